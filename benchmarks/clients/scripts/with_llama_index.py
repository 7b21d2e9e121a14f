"""LlamaIndex's OpenAILike."""

from typing import Literal

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from protocol import BASE_URL, KEY, MODEL, can, check, check_cancelled, check_city, run
from pydantic import BaseModel

City = Literal["Paris", "Rome"]
ROOM = {"max_tokens": 700}  # a small model calls a tool several times
QUESTION = [ChatMessage("What is the weather in Paris?")]


class Place(BaseModel):
    """A city."""

    city: City
    cold: bool


def get_weather(city: City) -> str:
    """Weather now."""
    return f"It is sunny in {city}."


def get_forecast(city: City) -> str:
    """Weather tomorrow."""
    return f"It rains in {city}."


WEATHER = FunctionTool.from_defaults(get_weather)
FORECAST = FunctionTool.from_defaults(get_forecast)


def model(**options: object) -> OpenAILike:
    asked = {
        "max_tokens": 48,
        "max_retries": 0,
        "is_chat_model": True,
        "is_function_calling_model": True,
        "temperature": 0,
        **options,
    }
    return OpenAILike(model=MODEL, api_base=BASE_URL, api_key=KEY, **asked)


@can("chat")
def chat() -> None:
    check(model().chat(QUESTION).message.content, "there is no text")
    check(model(is_chat_model=False).complete("Once").text, "there is no completion")


@can("stream")
def stream() -> None:
    pieces = [answer.delta or "" for answer in model().stream_chat(QUESTION)]
    check(len(pieces) > 2, "the text came in one piece")
    whole = model().chat(QUESTION).message.content
    check("".join(pieces) == whole, f"{pieces} are not {whole!r}")


@can("history")
def history() -> None:
    messages = [ChatMessage("Be brief.", role="system"), *QUESTION]
    answer = model().chat(messages).message
    check(model().chat([*messages, answer, *QUESTION]).message.content, "there is no text")


@can("usage")
def usage() -> None:
    check(model().chat(QUESTION).raw.usage.completion_tokens, "there is no usage")
    options = {"stream_options": {"include_usage": True}}
    *_, last = model(additional_kwargs=options).stream_chat(QUESTION)
    check(last.raw.usage.completion_tokens, "the stream has no usage")


@can("stop")
def stop() -> None:
    end = model().chat(QUESTION).message.content.split()[2]
    stopped = model().chat(QUESTION, stop=[end]).message.content
    check(end not in stopped, stopped)


@can("seed")
def seed() -> None:
    asked = model(temperature=1, additional_kwargs={"seed": 7})
    texts = {asked.chat(QUESTION).message.content for _ in range(2)}
    check(len(texts) == 1, f"the same seed gave {texts}")


@can("logprobs")
def logprobs() -> None:
    found = model(logprobs=True, top_logprobs=2).chat(QUESTION).logprobs
    check(found and all(len(token) == 2 for token in found), f"{found}")


@can("tool")
def required() -> None:
    asked = model(**ROOM)
    answer = asked.chat_with_tools([WEATHER, FORECAST], chat_history=QUESTION, tool_required=True)
    check_city(asked.get_tool_calls_from_response(answer)[0].tool_kwargs)


@can("named tool")
def named() -> None:
    asked = model(**ROOM)
    choice = "get_forecast"
    answer = asked.chat_with_tools([WEATHER, FORECAST], chat_history=QUESTION, tool_choice=choice)
    (call,) = asked.get_tool_calls_from_response(answer)
    check(call.tool_name == choice, f"{call}")


@can("tool loop")
def loop() -> None:
    asked = model(**ROOM)
    first = asked.chat_with_tools([WEATHER], chat_history=QUESTION, tool_required=True)
    results = [
        ChatMessage("Sunny.", role="tool", additional_kwargs={"tool_call_id": call.tool_id})
        for call in asked.get_tool_calls_from_response(first)
    ]
    answer = asked.chat_with_tools([WEATHER], chat_history=[*QUESTION, first.message, *results])
    called = asked.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
    check(answer.message.content or called, "there is no answer")


@can("streamed tool")
def streamed_tool() -> None:
    asked = model(**ROOM)
    *_, last = asked.stream_chat_with_tools([WEATHER], chat_history=QUESTION, tool_required=True)
    check_city(asked.get_tool_calls_from_response(last)[0].tool_kwargs)


@can("schema")
def schema() -> None:
    for by_format in (True, False):
        asked = model(**ROOM, should_use_structured_outputs=by_format).as_structured_llm(Place)
        check(isinstance(asked.chat(QUESTION).raw, Place), "there is no place")


@can("error")
def error() -> None:
    try:
        model(additional_kwargs={"temperature": -1}).chat(QUESTION)
    except openai.BadRequestError as refused:
        check("temperature" in str(refused), str(refused))
    else:
        check(False, "nothing was raised")


@can("cancel")
async def cancel() -> None:
    asked = model(max_tokens=2000, additional_kwargs={"extra_body": {"ignore_eos": True}})
    await check_cancelled(asked.achat(QUESTION))


run()
