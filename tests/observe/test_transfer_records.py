"""What waiting for another engine's blocks looks like in a trace."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from legato.cli.explain import explanation
from legato.core.step_record import BlocksFetched, EngineRecord, RequestArrived, StepRecord
from legato.observe.traces.attribution import Attribution
from legato.observe.traces.perfetto import PerfettoTrace
from legato.observe.traces.request_story import read_story
from legato.observe.traces.spans import Progresses, span_events
from legato.observe.traces.trace_file import JsonlTrace, TraceHeader
from tests.observe.recorded import answer_record, recorded_run

HEADER = TraceHeader(started_s=0.0, unix_s=None, settings={})
WAIT_S = 0.05


def fetched_run() -> tuple[list[EngineRecord], BlocksFetched]:
    """A stream, and a request that comes to it with a prompt that another engine has.

    It is as if the request had waited for blocks from its arrival on: in the steps of the stream
    that ran meanwhile, it has no chunk.
    """
    records = recorded_run([(0.0, 8, 12), (0.1, 6, 2)], budget=32)
    [came] = [r for r in records if isinstance(r, RequestArrived) and r.request_id == "1"]
    admitted = next(r for r in records if isinstance(r, StepRecord) and "1" in r.admitted)
    shift_s = 0.1 + WAIT_S
    later = [_later(r, shift_s) if _at(r) >= admitted.planned_s else r for r in records]
    begun_s = came.taken_s + 0.001
    fetched = BlocksFetched(
        request_id="1",
        begun_s=begun_s,
        ended_s=begun_s + WAIT_S,
        num_tokens=4,
        num_wanted_tokens=8,
    )
    at = next(i for i, r in enumerate(later) if _at(r) >= fetched.ended_s)
    return [*later[:at], fetched, *later[at:]], fetched


def _at(record: EngineRecord) -> float:
    match record:
        case StepRecord():
            return record.planned_s
        case RequestArrived():
            return record.arrived_s
        case _:
            return record.ended_s  # type: ignore[union-attr]


def _later(record: EngineRecord, by_s: float) -> EngineRecord:
    fields = [name for name in ("planned_s", "started_s", "ended_s") if hasattr(record, name)]
    return replace(record, **{name: getattr(record, name) + by_s for name in fields})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    written = JsonlTrace(path, HEADER)
    written.write(fetched_run()[0])
    written.close()
    return path


def test_the_wait_for_blocks_is_a_part_of_the_first_tokens(trace: Path) -> None:
    story = read_story(trace, "1")
    attribution = Attribution(story)
    span = attribution.first_token()
    assert span is not None
    assert sum(span.parts.values()) == pytest.approx(span.seconds)
    assert span.parts["transfer"] == pytest.approx(WAIT_S)
    told = explanation(story, attribution, 0)
    assert f"4 of 8 tokens came from another engine, in {WAIT_S:.4f} s" in told
    assert any("until its prompt's blocks had come from another engine" in line for line in told)


def test_it_is_no_part_of_anothers(trace: Path) -> None:
    attribution = Attribution(read_story(trace, "0"))
    assert not any("transfer" in attribution.gap(i).parts for i in range(len(attribution.gaps())))


def test_a_timeline_shows_it_between_the_queue_and_the_first_chunk(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    records, fetched = fetched_run()
    written = PerfettoTrace(path, HEADER)
    written.write(records)
    written.close()
    events = json.loads(path.read_text())
    [shown] = [event for event in events if event["name"] == "fetching blocks"]
    assert (shown["ts"], shown["dur"]) == pytest.approx((fetched.begun_s * 1e6, WAIT_S * 1e6))
    on_track = [e for e in events if e.get("tid") == shown["tid"] and e["ph"] == "X"]
    slices = sorted((e["ts"], e["ts"] + e["dur"]) for e in on_track if e["pid"] == shown["pid"])
    for (_, ends), (begins, _) in pairwise(slices):
        assert begins >= ends - 1e-3


def test_a_span_marks_when_they_were_there() -> None:
    records, fetched = fetched_run()
    progresses = Progresses()
    for record in records:
        progresses.note(record)
    events = dict(span_events([*progresses.take(answer_record("1")).values()]))
    assert events["blocks fetched"] == fetched.ended_s
