"""How far spans say that requests have come."""

import asyncio
import math
from typing import Any, get_args

import msgspec
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from legato.api.answer import UsageCounter
from legato.core.outputs import RequestOutput
from legato.core.step_record import (
    AnswerRecord,
    Operation,
    Record,
    RequestArrived,
    RequestEnded,
    StepRecord,
)
from legato.language.completion import CompletionDelta
from legato.observe.traces.feed import RecordFeed
from legato.observe.traces.spans import Progress, Progresses, SpanExport, span_attributes
from tests.observe.recorded import answer_record, recorded_run


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_requests_last_token_is_its_end(depth: int) -> None:
    """Also where a step that was in flight then holds it."""
    records = recorded_run([(0.0, 9, 30), (0.0, 5, 30)], depth=depth, is_random=True)
    progresses = Progresses()
    for record in records:
        progresses.note(record)
    arrived = {r.request_id: r.arrived_s for r in records if isinstance(r, RequestArrived)}
    ended = {r.request_id: r.ended_s for r in records if isinstance(r, RequestEnded)}
    for name in ("0", "1"):
        [progress] = progresses.take(answer_record(name)).values()
        assert progress.arrived_s == arrived[name]
        assert progress.admitted_s is not None
        assert progress.first_token_s is not None
        assert progress.admitted_s < progress.first_token_s < ended[name]
        assert progress.last_token_s == ended[name]
        assert progresses.take(answer_record(name)) == {}


def test_a_span_tells_of_drafts_where_there_were_any() -> None:
    records = recorded_run([(0.0, 9, 30), (0.0, 5, 1)], speculative=4, vocab_size=2)
    progresses = Progresses()
    for record in records:
        progresses.note(record)
    chunks = [c for r in records if isinstance(r, StepRecord) for c in r.chunks]
    told = [
        span_attributes(answer_record(name), progresses.take(answer_record(name)), "m")
        for name in ("0", "1")
    ]
    assert told[0]["legato.usage.draft_tokens"] == sum(chunk.num_drafts for chunk in chunks)
    right = sum(chunk.num_accepted for chunk in chunks)
    assert told[0]["legato.usage.accepted_draft_tokens"] == right > 0
    assert not any("draft" in name for name in told[1])


async def exported(records: list[AnswerRecord]) -> list[dict[str, Any]]:
    """The attributes of the spans of these answers, as they are exported."""
    feed = RecordFeed[Record](lambda _: None)
    exporter = InMemorySpanExporter()
    export = SpanExport(feed, "m", "http://127.0.0.1:1/v1/traces", exporter)
    for record in records:
        feed.publish([record])
        await asyncio.sleep(0)
    await export.stop()
    return [dict(span.attributes or {}) for span in exporter.get_finished_spans()]


def test_every_operation_has_a_span() -> None:
    answers = [
        msgspec.structs.replace(answer_record("0"), operation=operation, http_id=operation)
        for operation in get_args(Operation)
    ]
    told = asyncio.run(exported(answers))
    assert [one["gen_ai.request.id"] for one in told] == list(get_args(Operation))
    assert all(one["gen_ai.response.id"].endswith("def") for one in told)
    of_text = {one["gen_ai.request.id"] for one in told if "gen_ai.response.finish_reasons" in one}
    assert of_text == set(get_args(Operation)) - {"embeddings", "score", "rerank"}


@pytest.mark.parametrize("max_tokens", [None, 5])
def test_a_span_has_the_samplers_settings_with_or_without_a_limit(max_tokens: int | None) -> None:
    """Most clients of chats send none."""
    answer = msgspec.structs.replace(answer_record("0"), max_tokens=max_tokens)
    told = span_attributes(answer, {}, "m")
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.request.temperature"] == 0.0
    assert told.get("gen_ai.request.max_tokens") == max_tokens


def test_an_answer_that_cannot_be_exported_loses_its_own_span_only() -> None:
    broken = answer_record("0", received_s=math.nan)
    told = asyncio.run(exported([broken, answer_record("1"), broken, answer_record("2")]))
    assert len(told) == 2


def test_cached_tokens_are_those_of_the_answers_usage() -> None:
    answer = msgspec.structs.replace(answer_record(""), n=2)
    progress = {}
    usage = UsageCounter(60)
    for choice, num_cached in enumerate((16, 20, 32, 40)):
        progress[choice] = Progress(0.0)
        progress[choice].admitted_s = 0.1
        progress[choice].num_cached_tokens = num_cached
        output = RequestOutput(request_id="", num_cached_tokens=num_cached)
        delta = CompletionDelta(
            output=output,
            index=choice % 2,
            text="",
            token_ids=(),
            logprobs=None,
            finish_reason=None,
            stop_reason=None,
            received_s=0.0,
        )
        usage.add(choice, delta)
    told = span_attributes(answer, progress, "m")["gen_ai.usage.cache_read.input_tokens"]
    assert told == usage.so_far.prompt_tokens_details.cached_tokens == 48
