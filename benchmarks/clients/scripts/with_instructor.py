"""Instructor over OpenAI's client."""

from typing import Literal

import instructor
import openai
from protocol import BASE_URL, KEY, MODEL, can, check, run
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
SMALL = {"model": MODEL, "messages": QUESTION, "max_tokens": 700, "max_retries": 0}


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    cold: bool


def client(mode: instructor.Mode) -> instructor.Instructor:
    server = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
    return instructor.from_openai(server, mode=mode)


def check_place(mode: instructor.Mode) -> None:
    place, answer = client(mode).create_with_completion(**SMALL, response_model=Place)
    check(isinstance(place, Place), f"{mode}: {answer}")


@can("named tool")
def tools() -> None:
    check_place(instructor.Mode.TOOLS)
    check_place(instructor.Mode.TOOLS_STRICT)


@can("streamed tool")
def streamed_tool() -> None:
    *_, last = client(instructor.Mode.TOOLS).create_partial(**SMALL, response_model=Place)
    check(last.city in ("Paris", "Rome"), f"{last}")


@can("schema")
def schema() -> None:
    check_place(instructor.Mode.JSON_SCHEMA)


@can("responses")
def responses() -> None:
    asked = {"model": MODEL, "input": "The weather in Paris?", "max_retries": 0}
    place = client(instructor.Mode.RESPONSES_TOOLS).responses.create(**asked, response_model=Place)
    check(isinstance(place, Place), f"{place}")


@can("error")
def error() -> None:
    try:
        client(instructor.Mode.JSON_SCHEMA).create(**SMALL, response_model=Place, temperature=-1)
    except (openai.BadRequestError, instructor.core.InstructorRetryException) as refused:
        check("temperature" in str(refused), str(refused))
    else:
        check(False, "nothing was raised")


run()
