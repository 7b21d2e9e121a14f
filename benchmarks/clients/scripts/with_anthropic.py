"""Anthropic's client, over /v1/messages."""

from typing import Literal

import anthropic
from protocol import KEY, MODEL, URL, WEATHER, can, check, check_city, check_idle, run
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {"name": "get_weather", "description": "Weather now", "input_schema": WEATHER}
FORECAST = {**TOOL, "name": "get_forecast"}
SMALL = {"model": MODEL, "messages": QUESTION, "max_tokens": 48}
ROOMY = {**SMALL, "max_tokens": 700}  # a small model calls a tool several times
GREEDY = {**SMALL, "extra_body": {"temperature": 0}}  # the client has no such option any more


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    cold: bool


def call_of(answer: anthropic.types.Message) -> anthropic.types.ToolUseBlock:
    check(answer.stop_reason == "tool_use", f"stop_reason is {answer.stop_reason}")
    return next(block for block in answer.content if block.type == "tool_use")


@can("chat")
def chat() -> None:
    check(client.messages.create(**SMALL).content[0].text, "there is no text")


@can("stream")
def stream() -> None:
    with client.messages.stream(**GREEDY) as events:
        pieces = list(events.text_stream)
        whole = events.get_final_text()
    check(len(pieces) > 2, "the text came in one piece")
    check("".join(pieces) == whole, f"{pieces} are not {whole!r}")


@can("history")
def history() -> None:
    first = client.messages.create(**SMALL, system=[{"type": "text", "text": "Be brief."}])
    messages = [*QUESTION, {"role": "assistant", "content": first.content}, *QUESTION]
    answer = client.messages.create(**{**SMALL, "messages": messages}, system="Be brief.")
    check(answer.content[0].text, "there is no text")


@can("usage")
def usage() -> None:
    whole = client.messages.create(**GREEDY).usage
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION)
    read = whole.input_tokens + whole.cache_read_input_tokens
    check(counted.input_tokens == read, f"{counted}, not {whole}")
    with client.messages.stream(**GREEDY) as events:
        streamed = events.get_final_message().usage
    check(streamed.output_tokens == whole.output_tokens, f"{streamed}, not {whole}")


@can("stop")
def stop() -> None:
    end = client.messages.create(**GREEDY).content[0].text.split()[2]
    stopped = client.messages.create(**GREEDY, stop_sequences=[end])
    check(stopped.stop_reason == "stop_sequence", f"{stopped}")
    check(stopped.stop_sequence == end, f"{stopped}")


@can("tool")
def required() -> None:
    asked = {**ROOMY, "tools": [TOOL, FORECAST], "tool_choice": {"type": "any"}}
    check_city(call_of(client.messages.create(**asked)).input)


@can("named tool")
def named() -> None:
    choice = {"type": "tool", "name": "get_forecast"}
    call = call_of(client.messages.create(**ROOMY, tools=[TOOL, FORECAST], tool_choice=choice))
    check(call.name == "get_forecast", f"{call}")


@can("tool loop")
def loop() -> None:
    asked = {**ROOMY, "tools": [TOOL]}
    first = client.messages.create(**asked, tool_choice={"type": "any"})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "Sunny."}
        for block in first.content
        if block.type == "tool_use"
    ]
    turns = [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    answer = client.messages.create(**{**asked, "messages": [*QUESTION, *turns]})
    check(answer.content, "there is no answer")


@can("streamed tool")
def streamed_tool() -> None:
    choice = {"type": "any"}
    with client.messages.stream(**ROOMY, tools=[TOOL], tool_choice=choice) as events:
        kinds = [event.type for event in events]
        check_city(call_of(events.get_final_message()).input)
    check(kinds.count("input_json") > 1, "the arguments came in one piece")


@can("schema")
def schema() -> None:
    answer = client.messages.parse(**ROOMY, output_format=Place)
    check(isinstance(answer.parsed_output, Place), f"{answer}")


@can("error")
def error() -> None:
    try:
        client.messages.create(**SMALL, extra_body={"temperature": -1})
    except anthropic.BadRequestError as refused:
        check(refused.body["error"]["type"] == "invalid_request_error", f"{refused.body}")
        check("temperature" in refused.message, refused.message)
    else:
        check(False, "nothing was raised")


@can("cancel")
def cancel() -> None:
    asked = {**SMALL, "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    with client.messages.create(**asked, stream=True) as events:
        next(iter(events))
    check_idle()


run()
