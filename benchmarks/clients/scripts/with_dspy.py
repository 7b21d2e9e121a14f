"""DSPy, which asks through LiteLLM."""

import os
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet

import dspy
from protocol import BASE_URL, KEY, MODEL, can, check, run

City = Literal["Paris", "Rome"]
QUESTION = "What is the weather in Paris?"


class Report(dspy.Signature):
    """Say which city it is, and whether it is cold."""

    question: str = dspy.InputField()
    city: City = dspy.OutputField()
    cold: bool = dspy.OutputField()


def model(**options: object) -> dspy.LM:
    asked = {"max_tokens": 64, "temperature": 0, "cache": False, "num_retries": 0, **options}
    return dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=KEY, **asked)


def get_weather(city: City) -> str:
    """Weather now."""
    return f"It is sunny in {city}."


@can("chat")
def chat() -> None:
    check(model()(QUESTION)[0], "there is no text")


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
    check(len(model(n=3, temperature=1)(QUESTION)) == 3, "not three answers")


@can("logprobs")
def logprobs() -> None:
    (answer,) = model(logprobs=True)(QUESTION)
    check(answer["logprobs"], f"{answer}")


@can("tool")
def required() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather now",
            "parameters": dspy.Tool(get_weather).args
            and {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
                "required": ["city"],
            },
        },
    }
    (answer,) = model()(QUESTION, tools=[tool], tool_choice="required")
    check(answer["tool_calls"], f"{answer}")


@can("tool loop")
def loop() -> None:
    adapter = dspy.JSONAdapter(use_native_function_calling=False)
    with dspy.context(lm=model(max_tokens=300), adapter=adapter):
        agent = dspy.ReAct("question -> answer: bool", tools=[get_weather], max_iters=1)
        agent(question=QUESTION)


@can("schema")
def schema() -> None:
    with dspy.context(lm=model(), adapter=dspy.JSONAdapter()):
        answer = dspy.Predict(Report)(question=QUESTION)
    check(answer.city in ("Paris", "Rome"), f"{answer}")


@can("responses")
def responses() -> None:
    check(model(model_type="responses")(QUESTION)[0], "there is no text")


@can("error")
def error() -> None:
    try:
        model(temperature=-1)(QUESTION)
    except Exception as refused:
        check("temperature" in str(refused), f"{type(refused).__name__}: {refused}")
    else:
        check(False, "nothing was raised")


run()
