"""Traces and spans of a real server, against what its clients saw."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from legato.core.errors import ConfigError
from legato.core.step_record import AnswerRecord
from legato.observe.traces.attribution import Attribution
from legato.observe.traces.request_story import RequestStory, read_story
from legato.observe.traces.trace_file import read_trace
from tests.api.background import BackgroundStream
from tests.api.launch import MODEL, ServerProcess, running_server, wait_until
from tests.api.span_collector import SpanCollector, attributes, collecting_spans
from tests.forks.start import run

KEY = "secret"
AUTH = {"Authorization": f"Bearer {KEY}"}
LONG_PROMPT = "word " * 600
MAY_BE_INTERRUPTED_S = 0.1
"""A server that has written to a socket and is about to look at the clock."""


class Traced(NamedTuple):
    server: ServerProcess
    trace: Path
    spans: SpanCollector

    @property
    def client(self) -> openai.OpenAI:
        return self.server.openai(KEY)

    def story(self, request_id: str, choice: int = 0) -> RequestStory:
        """Once all of it is in the file."""
        found: list[RequestStory] = []

        def is_complete() -> bool:
            try:
                found[:] = [read_story(self.trace, request_id, choice)]
            except ConfigError:
                return False
            return found[0].answer is not None and found[0].ended is not None

        wait_until(is_complete, f"the trace never had all of {request_id}")
        return found[0]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    trace = folder / "trace.jsonl.gz"
    with collecting_spans() as spans:
        flags = ("--trace", str(trace), "--otlp-traces-endpoint", spans.url, "--api-key", KEY)
        with running_server(folder, *flags, "--max-num-batched-tokens", "64") as server:
            server.http.headers.update(AUTH)
            yield Traced(server, trace, spans)


class Seen(NamedTuple):
    """What a client saw of a stream: when it was sent, and when each chunk came."""

    answer_id: str
    sent_s: float
    came_s: list[float]


def stream(traced: Traced, prompt: str = "Hello", **fields: object) -> Seen:
    sent_s = time.monotonic()
    came_s = []
    for chunk in traced.client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        stream=True,
        max_tokens=6,
        temperature=0,
        **fields,
    ):
        came_s.append(time.monotonic())
        answer_id = chunk.id
    return Seen(answer_id, sent_s, came_s)


def test_a_story_lies_within_what_the_client_saw_and_adds_up(traced: Traced) -> None:
    streams = [BackgroundStream(traced.server, max_tokens=100) for _ in range(2)]
    seen = stream(traced, LONG_PROMPT)
    for running in streams:
        running.join()
    story = traced.story(seen.answer_id)
    attribution = Attribution(story)
    first = attribution.first_token()
    assert first is not None
    assert seen.sent_s < first.start_s < first.end_s
    assert len(attribution.told_s) == len(seen.came_s)
    for told_s, came_s in zip(attribution.told_s, seen.came_s, strict=True):
        assert told_s < came_s + MAY_BE_INTERRUPTED_S
    spans = [first, *map(attribution.gap, range(len(seen.came_s) - 1))]
    for span in spans:
        assert sum(span.parts.values()) == pytest.approx(span.seconds)
        assert "unrecorded" not in span.parts
    assert {"http_in", "own_prefill", "others_decode", "http_out"} <= set(first.parts)
    assert story.num_dropped == 0


def test_explain_and_convert_read_what_a_server_writes(traced: Traced, tmp_path: Path) -> None:
    seen = stream(traced)
    traced.story(seen.answer_id)
    told = legato("explain", str(traced.trace), seen.answer_id)
    assert "computing its own prompt" in told
    assert "to the next" in told
    listed = legato("explain", str(traced.trace), "--by", "ttft")
    assert seen.answer_id.removeprefix("chatcmpl-")[:8] in listed
    assert "own prompt" in listed
    legato("trace", "convert", str(traced.trace), str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())
    assert any(event["name"].startswith("step ") for event in events)


def test_each_completion_has_a_story_of_its_own(traced: Traced) -> None:
    answer = traced.client.completions.create(model=MODEL, prompt="One", n=2, max_tokens=3)
    stories = [traced.story(answer.id, choice) for choice in range(2)]
    assert len({story.request_id for story in stories}) == 2
    for story in stories:
        assert story.answer is not None
        assert not story.answer.is_streamed
        assert story.ended is not None
        assert story.ended.num_output_tokens == 3


def test_a_span_continues_the_trace_of_its_request(traced: Traced) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    seen = stream(traced, extra_headers={"traceparent": f"00-{trace_id}-{parent_id}-01"})
    span = traced.spans.span_of(seen.answer_id.removeprefix("chatcmpl-"))
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace_id, parent_id)
    assert (span.name, span.kind) == (f"chat {MODEL}", Span.SPAN_KIND_SERVER)
    assert span.start_time_unix_nano < span.end_time_unix_nano
    told = attributes(span)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.response.id"] == seen.answer_id
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.usage.output_tokens"] == told["gen_ai.usage.completion_tokens"] == 6
    assert told["gen_ai.request.max_tokens"] == 6
    latencies = [
        told[f"gen_ai.latency.{name}"]
        for name in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    ]
    assert sum(latencies) < told["gen_ai.latency.e2e"]  # type: ignore[arg-type, operator]
    assert [event.name for event in span.events] == ["first scheduled", "first token"]


def test_a_request_that_cannot_be_served_has_a_span_that_says_so(traced: Traced) -> None:
    with pytest.raises(openai.BadRequestError):
        traced.client.completions.create(
            model=MODEL, prompt="x", max_tokens=10**6, extra_headers={"X-Request-Id": "too-long"}
        )
    span = traced.spans.span_of("too-long")
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert "maximum context length" in span.status.message
    assert attributes(span)["error.type"] == "InvalidRequestError"


@pytest.mark.parametrize("trace_format", ["jsonl", "perfetto"])
def test_a_trace_can_be_recorded_live(traced: Traced, trace_format: str, tmp_path: Path) -> None:
    http = traced.server.http
    assert http.post("/trace/stop").status_code == 409
    assert http.post("/trace/start", json={"format": trace_format}).status_code == 200
    again = http.post("/trace/start", json={})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "trace_conflict")
    seen = stream(traced)
    answer = http.post("/trace/stop")
    assert answer.status_code == 200
    http_id = seen.answer_id.removeprefix("chatcmpl-")
    if trace_format == "perfetto":
        events = answer.json()
        assert any(http_id in str(event["args"]) for event in events if event["ph"] == "M")
        return
    path = tmp_path / "trace.jsonl"
    path.write_bytes(answer.content)
    answers = [line for line in read_trace(path)[1] if isinstance(line, AnswerRecord)]
    assert [answer.http_id for answer in answers] == [http_id]


def test_live_traces_want_the_key_and_what_they_know(traced: Traced) -> None:
    assert httpx.post(f"{traced.server.url}/trace/start", json={}).status_code == 401
    assert httpx.post(f"{traced.server.url}/trace/stop").status_code == 401
    for body in ({"format": "xml"}, {"path": "/tmp/x"}, []):
        assert traced.server.http.post("/trace/start", json=body).status_code == 400


def test_a_killed_server_leaves_what_it_has_written(traced: Traced) -> None:
    """The last test of the module."""
    seen = stream(traced)
    story = traced.story(seen.answer_id)
    traced.server.process.kill()
    traced.server.process.wait()
    assert read_story(traced.trace, seen.answer_id).answer == story.answer


def legato(*args: str) -> str:
    done = run("legato", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout
