"""LangChain's ChatOpenAI."""

import openai
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langchain_parts import HISTORY, QUESTION, City, Place, get_weather
from protocol import BASE_URL, KEY, MODEL, can, check, check_cancelled, check_city, run

ROOM = {"max_tokens": 700}  # a small model calls a tool several times


@tool
def get_forecast(city: City) -> str:
    """Weather tomorrow."""
    return f"It rains in {city}."


def model(**options: object) -> ChatOpenAI:
    asked = {"max_tokens": 48, "max_retries": 0, **options}
    return ChatOpenAI(base_url=BASE_URL, api_key=KEY, model=MODEL, **asked)


@can("chat")
def chat() -> None:
    check(model().invoke("Hello").content, "there is no text")


@can("stream")
def stream() -> None:
    asked = model(temperature=0)
    pieces = [chunk.content for chunk in asked.stream(QUESTION)]
    check(len(pieces) > 2, "the text came in one piece")
    check("".join(pieces) == asked.invoke(QUESTION).content, "the pieces are not the text")


@can("history")
def history() -> None:
    answer = model().invoke(HISTORY)
    check(model().invoke([*HISTORY, answer, *QUESTION]).content, "there is no text")


@can("usage")
def usage() -> None:
    asked = model(temperature=0, stream_usage=True)
    whole = asked.invoke(QUESTION).usage_metadata
    *_, last = (chunk.usage_metadata for chunk in asked.stream(QUESTION) if chunk.usage_metadata)
    check(last["output_tokens"] == whole["output_tokens"], f"{last}, not {whole}")


@can("stop")
def stop() -> None:
    asked = model(temperature=0)
    end = asked.invoke(QUESTION).content.split()[2]
    stopped = asked.invoke(QUESTION, stop=[end])
    check(stopped.response_metadata["finish_reason"] == "stop", f"{stopped.response_metadata}")


@can("seed")
def seed() -> None:
    asked = model(seed=7, temperature=1)
    texts = {asked.invoke(QUESTION).content for _ in range(2)}
    check(len(texts) == 1, f"the same seed gave {texts}")


@can("n")
def several() -> None:
    (choices,) = model(n=3).generate([QUESTION]).generations
    check(len(choices) == 3, f"{choices}")


@can("logprobs")
def logprobs() -> None:
    found = model(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]
    check(all(len(token["top_logprobs"]) == 2 for token in found["content"]), f"{found}")


@can("tool")
def required() -> None:
    tools = model(**ROOM).bind_tools([get_weather, get_forecast], tool_choice="required")
    check_city(tools.invoke(QUESTION).tool_calls[0]["args"])


@can("named tool")
def named() -> None:
    tools = model(**ROOM).bind_tools([get_weather, get_forecast], tool_choice="get_forecast")
    (call,) = tools.invoke(QUESTION).tool_calls
    check(call["name"] == "get_forecast", f"{call}")


@can("tool loop")
def loop() -> None:
    called = model(**ROOM).bind_tools([get_weather], tool_choice="required").invoke(QUESTION)
    results = [
        ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
        for call in called.tool_calls
    ]
    answer = model(**ROOM).bind_tools([get_weather]).invoke([*QUESTION, called, *results])
    check(answer.content or answer.tool_calls, "there is no answer")


@can("streamed tool")
def streamed_tool() -> None:
    tools = model(**ROOM).bind_tools([get_weather], tool_choice="required")
    first, *others = tools.stream(QUESTION)
    whole = sum(others, start=first)
    check_city(whole.tool_calls[0]["args"])


@can("schema")
def schema() -> None:
    for method in ("json_schema", "function_calling"):
        parsed = model(**ROOM).with_structured_output(Place, method=method).invoke(QUESTION)
        check(isinstance(parsed, Place), f"{method}: {parsed}")


@can("responses")
def responses() -> None:
    asked = model(use_responses_api=True, **ROOM)
    check(asked.invoke(QUESTION).text, "there is no text")
    check("".join(chunk.text for chunk in asked.stream(QUESTION)), "there is no text in the stream")
    check_city(
        asked.bind_tools([get_weather], tool_choice="required")
        .invoke(QUESTION)
        .tool_calls[0]["args"]
    )


@can("error")
def error() -> None:
    try:
        model(temperature=-1).invoke(QUESTION)
    except openai.BadRequestError as refused:
        check("temperature" in str(refused), str(refused))
    else:
        check(False, "nothing was raised")


@can("cancel")
async def cancel() -> None:
    asked = model(max_tokens=2000, extra_body={"ignore_eos": True})
    await check_cancelled(asked.ainvoke(QUESTION))


run()
