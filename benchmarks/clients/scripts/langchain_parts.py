"""What the scripts of LangChain's classes share: a question, a tool and a form of answers."""

from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from pydantic import BaseModel

City = Literal["Paris", "Rome"]
QUESTION = [HumanMessage("What is the weather in Paris?")]
HISTORY = [SystemMessage("Be brief."), HumanMessage("Hello"), AIMessage("Hello!"), *QUESTION]


class Place(BaseModel):
    """A city."""

    city: City
    cold: bool


@tool
def get_weather(city: City) -> str:
    """Weather now."""
    return f"It is sunny in {city}."
