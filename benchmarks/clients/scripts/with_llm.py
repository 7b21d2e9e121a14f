"""Simon Willison's llm, with the server in its extra-openai-models.yaml."""

import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Literal

import llm
import openai
from protocol import BASE_URL, MODEL, ClientFaultError, can, check, check_city, check_idle, run
from pydantic import BaseModel

home = Path(tempfile.mkdtemp(prefix="clients-llm-"))
os.environ["LLM_USER_PATH"] = str(home)
KINDS = {"chat": {}, "responses": {"responses": True}, "completion": {"completion": True}}
ENTRY = {"model_name": MODEL, "api_base": BASE_URL, "supports_tools": True, "supports_schema": True}
entries = [{"model_id": name, **ENTRY, **kind} for name, kind in KINDS.items()]
(home / "extra-openai-models.yaml").write_text(json.dumps(entries))  # JSON is YAML

QUESTION = "What is the weather in Paris?"
model = llm.get_model("chat")


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    cold: bool


def get_weather(city: str) -> str:
    """Weather now."""
    return f"It is sunny in {city[:20]}."


@can("chat")
def chat() -> None:
    check(model.prompt(QUESTION, max_tokens=48, stream=False).text(), "there is no text")
    completion = llm.get_model("completion").prompt("Once", max_tokens=16, stream=False)
    check(completion.text(), "there is no completion")


@can("stream")
def stream() -> None:
    pieces = list(model.prompt(QUESTION, max_tokens=48, temperature=0))
    check(len(pieces) > 2, "the text came in one piece")
    whole = model.prompt(QUESTION, max_tokens=48, temperature=0, stream=False).text()
    check("".join(pieces) == whole, f"{pieces} are not {whole!r}")


@can("history")
def history() -> None:
    conversation = model.conversation()
    conversation.prompt(QUESTION, system="Be brief.", max_tokens=48).text()
    check(conversation.prompt(QUESTION, max_tokens=48).text(), "there is no text")


@can("usage")
def usage() -> None:
    asked = {"max_tokens": 48, "temperature": 0}
    whole = model.prompt(QUESTION, **asked, stream=False).usage()
    streamed = model.prompt(QUESTION, **asked).usage()
    check(whole.output and streamed.output == whole.output, f"{streamed}, not {whole}")


@can("stop")
def stop() -> None:
    end = model.prompt(QUESTION, max_tokens=48, temperature=0).text().split()[2]
    stopped = model.prompt(QUESTION, max_tokens=48, temperature=0, stop=end).text()
    check(end not in stopped, stopped)


@can("seed")
def seed() -> None:
    texts = {model.prompt(QUESTION, max_tokens=48, seed=7).text() for _ in range(2)}
    check(len(texts) == 1, f"the same seed gave {texts}")


@can("logprobs")
def logprobs() -> None:
    completion = llm.get_model("completion").prompt("Once", max_tokens=16, logprobs=2)
    completion.text()
    check(completion.response_json["logprobs"], f"{completion.response_json}")


@can("tool loop")
def loop() -> None:
    """It has no `tool_choice`: the model is free, and the call in its history made by hand."""
    chain = model.conversation().chain(
        QUESTION, tools=[get_weather], chain_limit=3, options={"max_tokens": 48}
    )
    chain.text()
    result = llm.ToolResult("get_weather", "It is sunny.", tool_call_id="call_1")
    answer = model.prompt(tool_results=[result], tools=[get_weather], max_tokens=48)
    check(answer.text() or answer.tool_calls(), "there is no answer")


@can("schema")
def schema() -> None:
    text = model.prompt(QUESTION, schema=Place, max_tokens=700, stream=False).text()
    check_city({"city": Place.model_validate_json(text).city})
    Place.model_validate_json(model.prompt(QUESTION, schema=Place, max_tokens=700).text())


@can("responses")
def responses() -> None:
    over = llm.get_model("responses")
    check(over.prompt(QUESTION, max_tokens=48, stream=False).text(), "there is no text")
    check(over.prompt(QUESTION, max_tokens=48).text(), "there is no text in the stream")
    Place.model_validate_json(over.prompt(QUESTION, schema=Place, max_tokens=700).text())


@can("error")
def error() -> None:
    try:
        model.prompt(QUESTION, max_tokens=100_000).text()
    except openai.BadRequestError as refused:
        check("token" in str(refused), str(refused))
    else:
        check(False, "nothing was raised")


@can("cancel")
def cancel() -> None:
    answer = iter(model.prompt("Tell me a very long story.", max_tokens=2000))
    next(answer)
    answer.close()
    try:
        check_idle()
    except AssertionError:
        gc.collect()
        check_idle()
        raise ClientFaultError("it leaves the stream to the garbage collector") from None


run()
