"""OpenAI's own client for Python."""

from typing import Literal

import openai
from protocol import BASE_URL, KEY, MODEL, WEATHER, can, check, check_city, check_idle, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather now", "parameters": WEATHER},
}
FORECAST = {"type": "function", "function": {**TOOL["function"], "name": "get_forecast"}}
SMALL = {"model": MODEL, "messages": QUESTION, "max_tokens": 16}
ROOMY = {**SMALL, "max_tokens": 700}  # a small model calls a tool several times
ONE_CALL = {**ROOMY, "parallel_tool_calls": False}


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    cold: bool


@can("chat")
def chat() -> None:
    answer = client.chat.completions.create(**SMALL)
    check(answer.choices[0].message.content, "there is no text")


@can("stream")
def stream() -> None:
    asked = {**SMALL, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = client.chat.completions.create(**asked, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    check(len(pieces) > 2, "the text came in one piece")
    check("".join(pieces) == whole, f"{pieces} are not {whole!r}")


@can("history")
def history() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hello!"},
        *QUESTION,
    ]
    answer = client.chat.completions.create(**{**SMALL, "messages": messages})
    again = [*messages, answer.choices[0].message.model_dump(), *QUESTION]
    client.chat.completions.create(**{**SMALL, "messages": again})


@can("usage")
def usage() -> None:
    whole = client.chat.completions.create(**SMALL, temperature=0).usage
    chunks = client.chat.completions.create(
        **SMALL, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *_, last = chunks
    check(whole.total_tokens == whole.prompt_tokens + whole.completion_tokens, f"{whole}")
    check(last.usage.completion_tokens == whole.completion_tokens, f"{last.usage}, not {whole}")


@can("stop")
def stop() -> None:
    asked = {"model": MODEL, "prompt": "1, 2, 3, 4,", "max_tokens": 32, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    end = text.split()[2]
    stopped = client.completions.create(**asked, stop=[end]).choices[0]
    check(stopped.finish_reason == "stop" and end not in stopped.text, f"{stopped}")


@can("seed")
def seed() -> None:
    texts = {
        client.chat.completions.create(**SMALL, seed=7, temperature=1).choices[0].message.content
        for _ in range(2)
    }
    check(len(texts) == 1, f"the same seed gave {texts}")


@can("n")
def several() -> None:
    answer = client.chat.completions.create(**SMALL, n=3)
    check([choice.index for choice in answer.choices] == [0, 1, 2], f"{answer.choices}")


@can("logprobs")
def logprobs() -> None:
    answer = client.chat.completions.create(**SMALL, logprobs=True, top_logprobs=2)
    tokens = answer.choices[0].logprobs.content
    check(len(tokens) == answer.usage.completion_tokens, f"{len(tokens)} of {answer.usage}")
    check(all(len(token.top_logprobs) == 2 for token in tokens), "not two alternatives each")


@can("tool")
def required() -> None:
    answer = client.chat.completions.create(
        **ONE_CALL, tools=[TOOL, FORECAST], tool_choice="required"
    )
    choice = answer.choices[0]
    check(choice.finish_reason == "tool_calls", f"finish_reason is {choice.finish_reason}")
    check_city(choice.message.tool_calls[0].function.arguments)


@can("named tool")
def named() -> None:
    choice = {"type": "function", "function": {"name": "get_forecast"}}
    answer = client.chat.completions.create(**ROOMY, tools=[TOOL, FORECAST], tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    check(call.function.name == "get_forecast", f"{call}")
    check_city(call.function.arguments)


@can("tool loop")
def loop() -> None:
    asked = {**ONE_CALL, "tools": [TOOL]}
    message = client.chat.completions.create(**asked, tool_choice="required").choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
        for call in message.tool_calls
    ]
    messages = [*QUESTION, message.model_dump(), *results]
    answer = client.chat.completions.create(**{**asked, "messages": messages}).choices[0]
    check(answer.message.content or answer.message.tool_calls, "there is no answer")


@can("streamed tool")
def streamed_tool() -> None:
    asked = {**ONE_CALL, "tools": [TOOL], "tool_choice": "required"}
    with client.chat.completions.stream(**asked) as events:
        kinds = [event.type for event in events]
        call = events.get_final_completion().choices[0].message.tool_calls[0]
    check(kinds.count("tool_calls.function.arguments.delta") > 1, "the arguments came in one piece")
    check_city(call.function.arguments)


@can("schema")
def schema() -> None:
    answer = client.chat.completions.parse(**ROOMY, response_format=Place)
    check(isinstance(answer.choices[0].message.parsed, Place), f"{answer.choices[0].message}")


@can("responses")
def responses() -> None:
    asked = {"model": MODEL, "input": "Hello", "temperature": 0, "max_output_tokens": 64}
    answer = client.responses.create(**asked, instructions="Be brief.")
    check(answer.output_text, "there is no text")
    with client.responses.stream(**asked) as events:
        kinds = {event.type for event in events}
        check(events.get_final_response().output_text, "there is no text at the stream's end")
    check("response.output_text.delta" in kinds, f"there is no text among {kinds}")
    tool = {"type": "function", **TOOL["function"], "strict": True}
    called = client.responses.create(**asked, tools=[tool], tool_choice="required")
    check_city(called.output[0].arguments)
    parsed = client.responses.parse(**asked, text_format=Place)
    check(isinstance(parsed.output_parsed, Place), f"{parsed.output}")


@can("error")
def error() -> None:
    try:
        client.chat.completions.create(**SMALL, temperature=-1)
    except openai.BadRequestError as refused:
        check(refused.param == "temperature", f"{refused.body}")
        check("temperature" in refused.message, refused.message)
    else:
        check(False, "nothing was raised")


@can("cancel")
def cancel() -> None:
    asked = {**SMALL, "max_tokens": 2000}
    with client.chat.completions.create(
        **asked, stream=True, extra_body={"ignore_eos": True}
    ) as it:
        next(iter(it))
    check_idle()


run()
