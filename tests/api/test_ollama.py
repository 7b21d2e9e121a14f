"""Ollama's API, by the calls that its clients make; `benchmarks.clients` runs the clients."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from legato.api.arrival import Arrival
from legato.api.http.bodies import json_line
from legato.api.http.error_responses import error_response
from legato.api.http.errors import shutting_down
from legato.api.http.middleware import RequestIds, RequireApiKey
from legato.api.job import AnswerOptions, Job, JobPrompt
from legato.api.ollama.ollama_answer import OllamaChatFormat
from legato.api.ollama.ollama_body import OllamaLoaded
from legato.core.outputs import FinishReason, RefusalReason, RequestOutput
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.vocabulary import Vocabulary
from legato.engine.errors import OverloadedError
from legato.language.completion import CompletionDelta
from legato.language.message.known_syntaxes import HERMES
from legato.language.message.message_syntax import MessageSyntax
from tests.api.launch import MODEL

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY = {"num_predict": 4, "temperature": 0}
COUNTERS = ("total_duration", "prompt_eval_duration", "eval_duration")
_FUNCTION = {
    "name": "get_weather",
    "description": "Weather now",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": _FUNCTION}]


def post(http: httpx.Client, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    if status >= 400:
        assert answer.json().keys() == {"error"}
        return answer.json()["error"]
    lines = [json.loads(line) for line in answer.text.splitlines()]
    is_stream = answer.headers["content-type"] == "application/x-ndjson"
    return lines if is_stream else lines[0]


def test_copilot_finds_the_model_and_asks_it(http: httpx.Client) -> None:
    version = http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    [listed] = http.get("/api/tags").json()["models"]
    shown = post(http, "/api/show", {"model": listed["model"]})
    assert {"completion", "tools"} <= set(shown["capabilities"])
    family = shown["model_info"]["general.architecture"]
    served = http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert shown["model_info"][f"{family}.context_length"] == served
    assert shown["details"]["family"] == family == "llama"
    body = {"model": listed["model"], "messages": QUESTION, "max_tokens": 2, "tools": TOOLS}
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    assert "data: [DONE]" in http.post("/v1/chat/completions", json=asked).text


def test_open_webui_chats_and_makes_a_title(http: httpx.Client) -> None:
    assert http.get("/").text == http.get("/", headers={"Accept": "*/*"}).text
    assert http.get("/").text == "Ollama is running"
    assert http.head("/").status_code == 200
    page = http.get("/", headers={"Accept": "text/html"})
    assert "<html" in page.text
    for answer in (page, http.get("/")):
        assert (answer.headers["Vary"], answer.headers["Cache-Control"]) == ("Accept", "no-cache")
    [running] = http.get("/api/ps").json()["models"]
    assert running["name"] == running["model"] == MODEL
    assert running["size"] > 0 == running["size_vram"]
    assert len(running["digest"]) == 64
    options = {**GREEDY, "num_ctx": 2048, "repeat_last_n": 64, "repeat_penalty": 1.1, "tfs_z": 1}
    body = {"model": f"{MODEL}:latest", "messages": QUESTION, "options": options}
    *pieces, end = post(http, "/api/chat", {**body, "keep_alive": "30m"})
    assert [piece["done"] for piece in pieces] == [False] * len(pieces)
    assert end["message"] == {"role": "assistant", "content": ""}
    assert end["done_reason"] == "length"
    assert len(end["legato"]["warnings"]) == 2
    title = post(http, "/api/chat", {**body, "stream": False})
    assert title["message"]["content"] == "".join(p["message"]["content"] for p in pieces)
    for counted in (end, title):
        assert counted["eval_count"] == 4
        assert counted["prompt_eval_count"] == title["prompt_eval_count"] > 4
        assert all(counted[name] > 0 for name in COUNTERS)
        assert counted["total_duration"] >= counted["prompt_eval_duration"]


def test_a_prompt_is_answered_with_its_template_and_without(http: httpx.Client) -> None:
    asked = {"prompt": "Once upon a", "options": GREEDY, "stream": False}
    chat = post(http, "/api/generate", {**asked, "system": "Be brief."})
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Once upon a"},
    ]
    same = post(http, "/api/chat", {"messages": messages, "options": GREEDY, "stream": False})
    assert chat["response"] == same["message"]["content"]
    raw = post(http, "/api/generate", {**asked, "raw": True, "logprobs": True, "top_logprobs": 2})
    plain = http.post(
        "/v1/completions", json={"prompt": "Once upon a", "max_tokens": 4, "temperature": 0}
    ).json()
    assert raw["response"] == plain["choices"][0]["text"]
    assert raw["prompt_eval_count"] == plain["usage"]["prompt_tokens"]
    assert [len(token["top_logprobs"]) for token in raw["logprobs"]] == [2] * 4


def test_an_answer_has_the_asked_form(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"cold": {"type": "boolean"}}, "required": ["cold"]}
    asked = {"prompt": "Is it cold?", "format": schema, "stream": False, "options": {"seed": 1}}
    assert type(json.loads(post(http, "/api/generate", asked)["response"])["cold"]) is bool


@pytest.mark.parametrize(
    ("path", "empty"),
    [
        ("/api/chat", {"message": {"role": "assistant", "content": ""}}),
        ("/api/generate", {"response": ""}),
    ],
)
def test_a_request_without_a_prompt_loads_the_model(
    http: httpx.Client, path: str, empty: dict[str, Any]
) -> None:
    loaded = post(http, path, {"model": MODEL})
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    assert empty.items() <= loaded.items()
    answer = http.post(path, json={"model": MODEL, "keep_alive": "0s"})
    assert answer.json()["done_reason"] == "unload"
    assert "keep_alive" in answer.headers["Warning"]


def test_clients_in_go_send_every_field_that_they_know(http: httpx.Client) -> None:
    asked = {"system": "", "template": "", "verbose": False, "options": None}
    for names in ({"model": MODEL, "name": ""}, {"model": "", "name": MODEL}):
        assert post(http, "/api/show", {**asked, **names})["details"]["family"] == "llama"
        pulled = post(http, "/api/pull", {**names, "username": "", "password": ""})
        assert pulled == {"status": "success"}
    assert "model is missing" in post(http, "/api/show", {"model": "", "name": ""}, 400)
    schema = {"type": "object", "required": None, "properties": None}
    tools = [{"type": "function", "function": {"name": "now", "parameters": schema}}]
    chat = {"messages": QUESTION, "tools": tools, "options": {"num_predict": 1}}
    assert post(http, "/api/chat", chat)[-1]["done"]
    assert "tools.0" in post(http, "/api/chat", {"messages": QUESTION, "tools": [1]}, 400)


def test_vectors(http: httpx.Client) -> None:
    known = http.post("/v1/embeddings", json={"input": "Hello"}).json()["data"][0]["embedding"]
    made = post(http, "/api/embed", {"input": ["Hello", "Hi"]})
    assert made["embeddings"][0] == pytest.approx(known)
    assert made["prompt_eval_count"] >= 2
    [short] = post(http, "/api/embed", {"input": "Hello", "dimensions": 3})["embeddings"]
    assert len(short) == 3
    old = post(http, "/api/embeddings", {"prompt": "Hello"})["embedding"]
    length = sum(number * number for number in old) ** 0.5
    assert [number / length for number in old] == pytest.approx(known, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "status", "blamed"),
    [
        ("/api/chat", {"model": "other", "messages": QUESTION}, 404, "other"),
        ("/api/chat", {"messages": QUESTION, "options": {"num_ctx": 10**6}}, 400, "num_ctx"),
        ("/api/chat", {"messages": QUESTION, "options": {"mirostat": 2}}, 400, "mirostat"),
        ("/api/chat", {"messages": [{**QUESTION[0], "images": ["aGk="]}]}, 400, "images"),
        ("/api/chat", {"messages": QUESTION, "options": {"frobnicate": 1}}, 400, "frobnicate"),
        ("/api/chat", {"messages": QUESTION, "slo_class": "gold"}, 400, "gold"),
        ("/api/chat", {"messages": QUESTION, "keep_alive": "soon"}, 400, "keep_alive"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/api/generate", {"prompt": "a", "images": ["aGk="]}, 400, "images"),
        ("/api/generate", {"prompt": "a", "context": [1]}, 400, "context"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "system"),
        ("/api/generate", {"prompt": "word " * 9000}, 400, "context length"),
        ("/api/generate", {"prompt": "word " * 9000, "raw": True}, 400, "context length"),
        ("/api/embed", {"input": "word " * 9000}, 400, "context length"),
        ("/api/show", {}, 400, "model"),
        ("/api/pull", {"model": "other"}, 400, "downloads nothing"),
        ("/api/create", {}, 404, "/api/create"),
        ("/api/copy", {}, 404, "/api/copy"),
        ("/api/push", {}, 404, "/api/push"),
        ("/api/blobs/sha256:0", {}, 404, "/api/blobs"),
        ("/api/tags", {}, 405, "GET"),
    ],
)
def test_refusals_are_in_ollamas_form(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, blamed: str
) -> None:
    assert blamed in post(http, path, body, status)


def test_curls_own_content_type_is_taken_but_not_from_other_sites(http: httpx.Client) -> None:
    body, form = json.dumps({"model": MODEL}), "application/x-www-form-urlencoded"
    headers = {"Content-Type": form}
    assert http.post("/api/generate", content=body, headers=headers).status_code == 200
    headers |= {"Origin": "https://elsewhere.example"}
    refused = http.post("/api/generate", content=body, headers=headers)
    assert refused.status_code == 403
    assert refused.json().keys() == {"error"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverloadedError("full", reason=RefusalReason.QUEUE_FULL, retry_after_s=2.0), 429),
        (shutting_down(), 503),
        (None, 401),
    ],
)
async def test_any_refusal_is_in_ollamas_form(error: Exception | None, status: int) -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        assert error is not None
        await error_response(error)(scope, receive, send)

    counted: list[int] = []
    app = RequestIds(RequireApiKey(refuse, () if error else ("secret",), ()), counted.append)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
        answer = await http.post("/api/chat")
    assert answer.status_code == status
    assert counted == [status]
    assert answer.json().keys() == {"error"}
    assert ("Retry-After" in answer.headers) == (error is not None)


def test_a_line_has_no_line_ends_of_any_kind() -> None:
    line = json_line(OllamaLoaded(model="a\u2028b\x85c\n", created_at="", done_reason="load"))
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line)["model"] == "a\u2028b\x85c\n"


def deltas(*texts: str) -> Iterator[CompletionDelta]:
    for place, text in enumerate(texts, start=1):
        yield CompletionDelta(
            output=RequestOutput(request_id="r", scheduled_s=1.0),
            index=0,
            text=text,
            token_ids=(5,),
            logprobs=None,
            finish_reason=FinishReason.STOP if place == len(texts) else None,
            stop_reason=None,
            received_s=1.0 + place,
        )


def chat_format(syntax: MessageSyntax | None) -> OllamaChatFormat:
    job = Job(
        operation="chat",
        prompts=(JobPrompt.of([1, 2]),),
        params=SamplingParams(),
        service=ServiceParams(),
        answer=AnswerOptions(message_syntax=syntax),
    )
    arrival: Any = Arrival(
        request_id="r", answer_id="a", received_s=0.0, trace_context={}, warnings=[]
    )
    vocabulary: Any = Vocabulary
    return OllamaChatFormat(job, arrival, vocabulary, "m")


@pytest.mark.parametrize("is_streamed", [True, False])
def test_calls_come_whole_and_what_is_none_is_text(is_streamed: bool) -> None:
    texts = (
        "Hm. ", '<tool_call>\n{"name": "f", "argu', 'ments": {"a": [1]}}\n</tool_call>',
        '<tool_call>\n{"name": "g", "arguments": {}}', "\n</tool_call>",
        '<tool_call>\n{"name": "h", "arguments": {"b": ',
    )  # fmt: skip
    written = chat_format(MessageSyntax(tool_calls=HERMES))
    if is_streamed:
        lines = [line for delta in deltas(*texts) if (line := written.delta(0, delta))]
        found = [json.loads(line) for line in [*lines, *written.end()]]
    else:
        for delta in deltas(*texts):
            written.take(0, delta)
        found = [json.loads(b"".join(written.pieces()))]
    calls = [call for line in found for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"name": "f", "arguments": {"a": [1]}, "index": 0},
        {"name": "g", "arguments": {}, "index": 1},
    ]
    text = "".join(line["message"]["content"] for line in found)
    assert text == 'Hm.{"b": '
    assert found[-1]["done"]
    assert found[-1]["eval_count"] == len(texts)
    assert found[-1]["prompt_eval_duration"] == 1e9
    assert found[-1]["eval_duration"] == (len(texts) - 1) * 1e9


def test_durations_are_never_zero() -> None:
    written = chat_format(None)
    for delta in deltas("Hi"):
        written.take(0, delta)
    assert json.loads(b"".join(written.pieces()))["eval_duration"] == 1


def test_an_error_in_a_stream_is_its_last_line() -> None:
    [line] = chat_format(None).failed(shutting_down())
    assert msgspec.json.decode(line) == {"error": "the server is shutting down"}
