"""DSPy, with the server declared as a provider whose model has schemas and tools."""

import os
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet

import dspy
from dspy.lm15 import (
    AccessPolicy,
    ModelSupport,
    OpenAIChatCompat,
    ProviderDefinition,
    register_provider,
)
from protocol import BASE_URL, KEY, MODEL, WEATHER, can, check, run

City = Literal["Paris", "Rome"]
ROOM = {"max_tokens": 700}  # a small model calls a tool several times
QUESTION = "What is the weather in Paris?"
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather now", "parameters": WEATHER},
}
register_provider(
    ProviderDefinition.chat(
        AccessPolicy(provider="legato", base_url=BASE_URL), compat=OpenAIChatCompat()
    ),
    supports=ModelSupport(function_calling=True, response_schema=True),
)


class Report(dspy.Signature):
    """Say which city it is, and whether it is cold."""

    question: str = dspy.InputField()
    city: City = dspy.OutputField()
    cold: bool = dspy.OutputField()


class Call(dspy.Signature):
    """Find out."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def model(provider: str = "legato", **options: object) -> dspy.LM:
    asked = {"max_tokens": 48, "temperature": 0, "cache": False, "num_retries": 0, **options}
    return dspy.LM(f"{provider}/{MODEL}", api_base=BASE_URL, api_key=KEY, **asked)


def get_weather(city: City) -> str:
    """Weather now."""
    return f"It is sunny in {city}."


@can("chat")
def chat() -> None:
    for provider in ("legato", "openai"):
        check(model(provider)(QUESTION)[0], f"there is no text over {provider}")


@can("history")
def history() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": QUESTION},
    ]
    check(model()(messages=messages)[0], "there is no text")


@can("usage")
def usage() -> None:
    asked = model()
    asked(QUESTION)
    check(asked.history[-1]["usage"]["completion_tokens"], f"{asked.history[-1]}")


@can("n")
def several() -> None:
    check(len(model("openai", n=3, temperature=1)(QUESTION)) == 3, "not three answers")


@can("logprobs")
def logprobs() -> None:
    (answer,) = model("openai", logprobs=True)(QUESTION)
    check(answer["logprobs"], f"{answer}")


@can("tool")
def required() -> None:
    (answer,) = model("openai", **ROOM)(QUESTION, tools=[TOOL], tool_choice="required")
    check(answer["tool_calls"], f"{answer}")
    with dspy.context(lm=model(**ROOM), adapter=dspy.JSONAdapter()):
        predict = dspy.Predict(Call, tool_choice="required")
        answer = predict(question=QUESTION, tools=[dspy.Tool(get_weather)])
    check(answer.calls.tool_calls[0].args["city"] in ("Paris", "Rome"), f"{answer}")


@can("schema")
def schema() -> None:
    with dspy.context(lm=model(**ROOM), adapter=dspy.JSONAdapter()):
        answer = dspy.Predict(Report)(question=QUESTION)
    check(answer.city in ("Paris", "Rome") and isinstance(answer.cold, bool), f"{answer}")


@can("responses")
def responses() -> None:
    check(model("openai", model_type="responses")(QUESTION)[0], "there is no text")


@can("error")
def error() -> None:
    try:
        model("openai", temperature=-1)(QUESTION)
    except dspy.LMInvalidRequestError as refused:
        check("temperature" in str(refused), str(refused))
    else:
        check(False, "nothing was raised")


run()
