"""Pydantic AI, over chat completions and over Responses."""

from typing import Literal

from protocol import BASE_URL, KEY, MODEL, can, check, check_cancelled, run
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.messages import (
    ModelRequest,
    ModelResponse,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

City = Literal["Paris", "Rome"]
ROOM = {"max_tokens": 700}  # a small model calls a tool several times
QUESTION = "What is the weather in Paris?"


class Place(BaseModel):
    city: City
    cold: bool


def agent(over=OpenAIChatModel, tools=(), output_type=str, **settings) -> Agent:
    model = over(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
    return Agent(
        model,
        instructions="Be brief.",
        tools=tools,
        output_type=output_type,
        model_settings={"max_tokens": 48, **settings},
        retries=0,
    )


def get_weather(city: City) -> str:
    """Weather now."""
    return f"It is sunny in {city}."


@can("chat")
async def chat() -> None:
    check((await agent().run(QUESTION)).output, "there is no text")


@can("stream")
async def stream() -> None:
    async with agent(temperature=0).run_stream(QUESTION) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    check(len(pieces) > 2, "the text came in one piece")


@can("history")
async def history() -> None:
    first = await agent().run(QUESTION)
    again = await agent().run(QUESTION, message_history=first.all_messages())
    check(again.output, "there is no text")


@can("usage")
async def usage() -> None:
    found = (await agent(temperature=0).run(QUESTION)).usage
    async with agent(temperature=0).run_stream(QUESTION) as result:
        await result.get_output()
    check(result.usage.output_tokens == found.output_tokens, f"{result.usage}, not {found}")


@can("stop")
async def stop() -> None:
    end = (await agent(temperature=0).run(QUESTION)).output.split()[2]
    stopped = await agent(temperature=0, stop_sequences=[end]).run(QUESTION)
    check(end not in stopped.output, stopped.output)


@can("seed")
async def seed() -> None:
    asked = agent(seed=7, temperature=1)
    texts = {(await asked.run(QUESTION)).output for _ in range(2)}
    check(len(texts) == 1, f"the same seed gave {texts}")


@can("logprobs")
async def logprobs() -> None:
    result = await agent(openai_logprobs=True, openai_top_logprobs=2).run(QUESTION)
    check(result.all_messages()[-1].provider_details["logprobs"], "there are none")


@can("tool")
async def required() -> None:
    result = await agent(output_type=ToolOutput(Place), **ROOM).run(QUESTION)
    check(isinstance(result.output, Place), f"{result.output}")


@can("tool loop")
async def loop() -> None:
    asked = agent(tools=[get_weather])
    call = ToolCallPart("get_weather", {"city": "Paris"}, "call_1")
    turns = [
        ModelRequest([UserPromptPart(QUESTION)]),
        ModelResponse([call]),
        ModelRequest([ToolReturnPart("get_weather", "It is sunny.", "call_1")]),
    ]
    check((await asked.run(message_history=turns)).output, "there is no answer")


@can("streamed tool")
async def streamed_tool() -> None:
    async with agent(output_type=ToolOutput(Place), **ROOM).run_stream(QUESTION) as result:
        check(isinstance(await result.get_output(), Place), "there is no place")


@can("schema")
async def schema() -> None:
    result = await agent(output_type=NativeOutput(Place), **ROOM).run(QUESTION)
    check(isinstance(result.output, Place), f"{result.output}")


@can("responses")
async def responses() -> None:
    check((await agent(OpenAIResponsesModel).run(QUESTION)).output, "there is no text")
    async with agent(OpenAIResponsesModel).run_stream(QUESTION) as result:
        check(await result.get_output(), "there is no text in the stream")
    for output_type in (ToolOutput(Place), NativeOutput(Place)):
        result = await agent(OpenAIResponsesModel, output_type=output_type, **ROOM).run(QUESTION)
        check(isinstance(result.output, Place), f"{result.output}")


@can("error")
async def error() -> None:
    try:
        await agent(temperature=-1).run(QUESTION)
    except ModelHTTPError as refused:
        check(refused.status_code == 400, str(refused))
        check("temperature" in str(refused), str(refused))
    else:
        check(False, "nothing was raised")


@can("cancel")
async def cancel() -> None:
    asked = agent(max_tokens=2000, extra_body={"ignore_eos": True})
    await check_cancelled(asked.run(QUESTION))


run()
