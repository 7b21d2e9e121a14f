"""LiteLLM, with the server as an OpenAI-compatible one."""

import asyncio
import os
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet

import litellm
from protocol import BASE_URL, KEY, MODEL, WEATHER, can, check, check_city, check_idle, run
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather now", "parameters": WEATHER},
}
FORECAST = {"type": "function", "function": {**TOOL["function"], "name": "get_forecast"}}
SERVER = {"api_base": BASE_URL, "api_key": KEY, "model": f"openai/{MODEL}", "num_retries": 0}
SMALL = {**SERVER, "messages": QUESTION, "max_tokens": 48}
ROOMY = {**SMALL, "max_tokens": 700}  # a small model calls a tool several times


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    cold: bool


@can("chat")
def chat() -> None:
    check(litellm.completion(**SMALL).choices[0].message.content, "there is no text")


@can("stream")
def stream() -> None:
    asked = {**SMALL, "temperature": 0}
    whole = litellm.completion(**asked).choices[0].message.content
    pieces = [c.choices[0].delta.content or "" for c in litellm.completion(**asked, stream=True)]
    check(len(pieces) > 2, "the text came in one piece")
    check("".join(pieces) == whole, f"{pieces} are not {whole!r}")


@can("history")
def history() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *QUESTION]
    answer = litellm.completion(**{**SMALL, "messages": messages}).choices[0].message
    own = {**SMALL, "messages": [*messages, answer, *QUESTION]}
    check(litellm.completion(**own).choices[0].message.content, "there is no text")
    dumped = {**SMALL, "messages": [*messages, answer.model_dump(), *QUESTION]}
    check(litellm.completion(**dumped).choices[0].message.content, "there is no text")


@can("usage")
def usage() -> None:
    asked = {**SMALL, "temperature": 0}
    whole = litellm.completion(**asked).usage
    *_, last = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
    check(last.usage.completion_tokens == whole.completion_tokens, f"{last.usage}, not {whole}")


@can("stop")
def stop() -> None:
    asked = {**SMALL, "temperature": 0}
    end = litellm.completion(**asked).choices[0].message.content.split()[2]
    stopped = litellm.completion(**asked, stop=[end]).choices[0]
    check(stopped.finish_reason == "stop", f"{stopped}")
    check(end not in stopped.message.content, f"{stopped}")


@can("seed")
def seed() -> None:
    asked = {**SMALL, "seed": 7, "temperature": 1}
    texts = {litellm.completion(**asked).choices[0].message.content for _ in range(2)}
    check(len(texts) == 1, f"the same seed gave {texts}")


@can("n")
def several() -> None:
    check(len(litellm.completion(**SMALL, n=3).choices) == 3, "not three choices")


@can("logprobs")
def logprobs() -> None:
    choice = litellm.completion(**SMALL, logprobs=True, top_logprobs=2).choices[0]
    check(all(len(token.top_logprobs) == 2 for token in choice.logprobs.content), f"{choice}")


@can("tool")
def required() -> None:
    answer = litellm.completion(**ROOMY, tools=[TOOL, FORECAST], tool_choice="required")
    check_city(answer.choices[0].message.tool_calls[0].function.arguments)


@can("named tool")
def named() -> None:
    choice = {"type": "function", "function": {"name": "get_forecast"}}
    answer = litellm.completion(**ROOMY, tools=[TOOL, FORECAST], tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    check(call.function.name == "get_forecast", f"{call}")


@can("tool loop")
def loop() -> None:
    asked = {**ROOMY, "tools": [TOOL]}
    message = litellm.completion(**asked, tool_choice="required").choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "Sunny."}
        for call in message.tool_calls
    ]
    again = {**asked, "messages": [*QUESTION, message, *results]}
    answer = litellm.completion(**again).choices[0].message
    check(answer.content or answer.tool_calls, "there is no answer")


@can("streamed tool")
def streamed_tool() -> None:
    chunks = list(litellm.completion(**ROOMY, tools=[TOOL], tool_choice="required", stream=True))
    whole = litellm.stream_chunk_builder(chunks)
    check_city(whole.choices[0].message.tool_calls[0].function.arguments)


@can("schema")
def schema() -> None:
    text = litellm.completion(**ROOMY, response_format=Place).choices[0].message.content
    Place.model_validate_json(text)


@can("responses")
def responses() -> None:
    asked = {**SERVER, "input": "Hello", "max_output_tokens": 16}
    check(litellm.responses(**asked).output[0].content[0].text, "there is no text")
    kinds = [event.type.value for event in litellm.responses(**asked, stream=True)]
    check(kinds.count("response.output_text.delta") > 1, f"the text came in one piece: {kinds}")


@can("error")
def error() -> None:
    try:
        litellm.completion(**SMALL, temperature=-1)
    except litellm.BadRequestError as refused:
        check("temperature" in str(refused), str(refused))
    else:
        check(False, "nothing was raised")


@can("cancel")
async def cancel() -> None:
    asked = {**SMALL, "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    stream = await litellm.acompletion(**asked, stream=True)
    await anext(aiter(stream))
    await stream.aclose()
    await asyncio.to_thread(check_idle)


run()
