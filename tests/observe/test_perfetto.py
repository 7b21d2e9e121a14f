"""Traces for the Perfetto UI are what the trace event format asks for.

Perfetto's own reader is a program that cannot be had everywhere, so the format is checked here.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from legato.core.step_record import StepRecord
from legato.observe.traces.perfetto import PerfettoTrace
from legato.observe.traces.trace_file import RecordsDropped, TraceHeader, open_binary
from tests.observe.recorded import recorded_run

HEADER = TraceHeader(started_s=0.0, unix_s=None, settings={"model": "m"})
SHORT_OF_BLOCKS = ((0.0, 30, 12), (0.0, 30, 12), (0.01, 5, 4))
FIELDS = {
    "X": {"name", "ph", "pid", "tid", "ts", "dur", "args"},
    "i": {"name", "ph", "pid", "tid", "ts", "s", "args"},
    "C": {"name", "ph", "pid", "ts", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
    "s": {"name", "ph", "pid", "tid", "ts", "cat", "id"},
    "f": {"name", "ph", "pid", "tid", "ts", "cat", "id", "bp"},
}
"""Key a kind of event, value the fields that it must have, and no others."""


def written(
    path: Path, num_blocks: int = 64, depth: int = 1
) -> tuple[list[dict[str, Any]], list[StepRecord]]:
    records = recorded_run(SHORT_OF_BLOCKS, num_blocks=num_blocks, depth=depth)
    trace = PerfettoTrace(path, HEADER)
    trace.write(records[:3])
    trace.write([*records[3:], RecordsDropped(num_records=1)])
    trace.close()
    with open_binary(path, "rb") as file:
        events = json.load(file)
    return events, [record for record in records if isinstance(record, StepRecord)]


@pytest.fixture(params=["trace.json", "trace.json.gz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def test_events_are_of_the_format(path: Path) -> None:
    events, _ = written(path, num_blocks=18)
    for event in events:
        assert set(event) == FIELDS[event["ph"]]
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xisf"} == named


def test_each_chunk_is_a_slice_on_its_requests_track(path: Path) -> None:
    events, steps = written(path)
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert set(tracks) == {"steps", "0", "1", "2"}
    slices = Counter((e["tid"], e["args"].get("step"), e["ts"]) for e in events if e["ph"] == "X")
    for step in steps:
        for chunk in step.chunks:
            key = tracks[chunk.request_id], step.step_id, round(1e6 * step.planned_s, 1)
            assert slices[key] == 1
    assert sum(e["name"].startswith("step ") for e in events) == len(steps)


@pytest.mark.parametrize("depth", [1, 2])
def test_slices_of_a_track_do_not_overlap(path: Path, depth: int) -> None:
    events, _ = written(path, num_blocks=18, depth=depth)
    assert any(e["name"] == "preempted" for e in events)
    ends: dict[tuple[int, int], float] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], e["dur"])):
        track = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(track, 0.0) - 0.2, "rounded to a tenth of a microsecond"
        ends[track] = event["ts"] + event["dur"]


def test_arrows_lead_from_chunk_to_chunk(path: Path) -> None:
    events, _ = written(path)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert starts
    slices = {(e["tid"], e["ts"]) for e in events if e["ph"] == "X" and e["pid"] == 2}
    for arrow, start in starts.items():
        assert start["ts"] < ends[arrow]["ts"]
        assert start["tid"] == ends[arrow]["tid"]
        for end in (start, ends[arrow]):
            assert (end["tid"], end["ts"]) in slices


def test_verified_chunks_say_what_was_drafted_and_right(tmp_path: Path) -> None:
    records = recorded_run([(0.0, 8, 30)], speculative=4, vocab_size=2)
    trace = PerfettoTrace(tmp_path / "trace.json", HEADER)
    trace.write(records)
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    steps = {record.step_id: record for record in records if isinstance(record, StepRecord)}
    slices = {e["args"]["step"]: e for e in events if e["ph"] == "X" and "step" in e["args"]}
    assert any(step.num_accepted_tokens for step in steps.values())
    for step_id, step in steps.items():
        [chunk], shown = step.chunks, slices[step_id]
        if chunk.kind == "verify":
            assert shown["name"] == f"verify {chunk.num_accepted} of {chunk.num_drafts}"
            told = [shown["args"][name] for name in ("drafted", "accepted", "drafter")]
            assert told == [chunk.num_drafts, chunk.num_accepted, "own"]
        else:
            assert "drafted" not in shown["args"]
    counted = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "drafts"]
    right = [step.num_accepted_tokens for step in steps.values()]
    wrong = [step.num_draft_tokens - step.num_accepted_tokens for step in steps.values()]
    assert counted == [{"accepted": a, "rejected": b} for a, b in zip(right, wrong, strict=True)]
    tokens = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "tokens"]
    assert [sum(e.values()) for e in tokens] == [s.chunks[0].num_tokens for s in steps.values()]
    assert sum(e["ph"] == "s" for e in events) <= 1, "a stream advances in every step"


def test_a_trace_without_its_end_can_be_completed(tmp_path: Path) -> None:
    trace = PerfettoTrace(tmp_path / "trace.json", HEADER)
    trace.write(recorded_run())
    written = (tmp_path / "trace.json").read_text()
    assert json.loads(written + "]")
