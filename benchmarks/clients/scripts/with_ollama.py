"""Ollama's own client for Python."""

import re
from typing import Literal

import ollama
from protocol import MODEL, URL, can, check, check_idle, run
from pydantic import BaseModel

client = ollama.Client(host=URL)
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY = {"num_predict": 48, "temperature": 0}


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    cold: bool


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather now.

    Args:
        city: a city.
    """
    return f"It is sunny in {city}."


@can("chat")
def chat() -> None:
    check(re.fullmatch(r"[\d.]+", client._request_raw("GET", "/api/version").json()["version"]), "")
    (model,) = client.list().models
    shown = client.show(model.model)
    check("completion" in shown.capabilities and "tools" in shown.capabilities, f"{shown}")
    length = shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"]
    (running,) = client.ps().models
    check(running.context_length == length, f"{running}, not {length}")
    check(client.pull(MODEL).status == "success", "the model is not present")
    check(client.chat(MODEL, QUESTION, options=GREEDY).message.content, "there is no text")
    check(client.generate(MODEL, "Once upon", options=GREEDY).response, "there is no text")
    (vector,) = client.embed(MODEL, "Hello").embeddings
    check(abs(sum(number * number for number in vector) - 1) < 1e-3, "its length is not 1")
    check(client.embeddings(MODEL, "Hello").embedding, "there is no vector")


@can("stream")
def stream() -> None:
    whole = client.chat(MODEL, QUESTION, options=GREEDY).message.content
    pieces = [
        piece.message.content for piece in client.chat(MODEL, QUESTION, options=GREEDY, stream=True)
    ]
    check(len(pieces) > 2, "the text came in one piece")
    check("".join(pieces) == whole, f"{pieces} are not {whole!r}")


@can("history")
def history() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello!"},
        *QUESTION,
    ]
    answer = client.chat(MODEL, messages, options=GREEDY)
    check(client.chat(MODEL, [*messages, answer.message, *QUESTION], options=GREEDY).done, "")


@can("usage")
def usage() -> None:
    whole = client.chat(MODEL, QUESTION, options=GREEDY)
    *_, last = client.chat(MODEL, QUESTION, options=GREEDY, stream=True)
    for counted in (whole, last):
        check(counted.eval_count == whole.eval_count > 0, f"{counted}")
        check(counted.prompt_eval_count == whole.prompt_eval_count > 0, f"{counted}")
        spent = counted.prompt_eval_duration + counted.eval_duration
        check(0 < spent <= counted.total_duration, f"{counted}")


@can("stop")
def stop() -> None:
    end = client.chat(MODEL, QUESTION, options=GREEDY).message.content.split()[2]
    stopped = client.chat(MODEL, QUESTION, options={**GREEDY, "stop": [end]})
    check(stopped.done_reason == "stop" and end not in stopped.message.content, f"{stopped}")


@can("seed")
def seed() -> None:
    options = {"num_predict": 48, "seed": 7, "temperature": 1}
    texts = {client.chat(MODEL, QUESTION, options=options).message.content for _ in range(2)}
    check(len(texts) == 1, f"the same seed gave {texts}")


@can("logprobs")
def logprobs() -> None:
    answer = client.chat(MODEL, QUESTION, options=GREEDY, logprobs=True, top_logprobs=2)
    check(len(answer.logprobs) == answer.eval_count, f"{len(answer.logprobs)}")
    check(all(len(token.top_logprobs) == 2 for token in answer.logprobs), f"{answer.logprobs}")


@can("tool loop")
def loop() -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Sunny.", "tool_name": "get_weather"},
    ]
    answer = client.chat(MODEL, messages, tools=[get_weather], options=GREEDY).message
    check(answer.content or answer.tool_calls, "there is no answer")


@can("schema")
def schema() -> None:
    answer = client.chat(MODEL, QUESTION, format=Place.model_json_schema(), options={"seed": 1})
    Place.model_validate_json(answer.message.content)


@can("error")
def error() -> None:
    for status, name, options in ((404, "other", {}), (400, MODEL, {"num_ctx": 10**6})):
        try:
            client.chat(name, QUESTION, options=options)
        except ollama.ResponseError as refused:
            check(refused.status_code == status, f"{refused.status_code}")
            check("num_ctx" in refused.error or "other" in refused.error, refused.error)
        else:
            check(False, "nothing was raised")


@can("cancel")
def cancel() -> None:
    pieces = client.chat(MODEL, QUESTION, options={"num_predict": 2000}, stream=True)
    next(pieces)
    pieces.close()
    check_idle()


run()
