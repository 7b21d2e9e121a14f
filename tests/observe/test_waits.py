"""All requests of a trace, side by side."""

from pathlib import Path

import pytest

from legato.cli.explain_all import tables
from legato.core.step_record import EngineRecord, RequestArrived
from legato.observe.traces.attribution import Attribution
from legato.observe.traces.request_story import read_stories, read_story
from legato.observe.traces.trace_file import JsonlTrace, TraceHeader
from legato.observe.traces.waits import read_waits, total_parts, waits_of
from tests.observe.recorded import recorded_run

ARRIVALS = [(0.0, 20, 20), (0.0, 90, 20), (0.3, 40, 1), (0.35, 8, 12)]


@pytest.fixture(scope="module")
def records() -> list[EngineRecord]:
    return recorded_run(ARRIVALS, num_blocks=32)


def write(path: Path, records: list[EngineRecord]) -> Path:
    trace = JsonlTrace(path, TraceHeader(started_s=0.0, unix_s=None, settings={}))
    trace.write(records)
    trace.close()
    return path


def test_each_is_as_if_it_were_asked_for(records: list[EngineRecord], tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", records)
    found = {waits.name: waits for waits in read_waits(path)}
    assert set(found) == {str(index) for index in range(len(ARRIVALS))}
    for name, waits in found.items():
        attribution = Attribution(read_story(path, name))
        assert waits.num_output_tokens == len(attribution.told_s)
        assert waits.first == attribution.first_token()
        gaps = attribution.gaps()
        assert (waits.longest and waits.longest.seconds) == (max(gaps) if gaps else None)


def test_a_trace_may_begin_and_end_in_the_middle(
    records: list[EngineRecord], tmp_path: Path
) -> None:
    """Who came before it has gaps, and who has not ended is there."""
    cut = [r for r in records if not (isinstance(r, RequestArrived) and r.request_id == "0")]
    stories = {s.request_id: s for s in read_stories(write(tmp_path / "t.jsonl", cut[:-8]))}
    assert len(stories) == len(ARRIVALS)
    assert any(story.ended is None for story in stories.values())
    waits = waits_of(stories["0"])
    assert waits.first is None
    assert waits.slo_class is None
    assert waits.longest is not None


def test_the_longest_come_first_and_sums_are_of_all(
    records: list[EngineRecord], tmp_path: Path
) -> None:
    waits = list(read_waits(write(tmp_path / "t.jsonl", records)))
    sums, longest = tables(waits, "first", 3)
    by_ttft = sorted(waits, key=lambda w: -w.first.seconds if w.first else 0.0)
    assert [row[0] for row in longest.rows] == [w.name for w in by_ttft[:3]]
    total_s = sum(w.first.seconds for w in waits if w.first)
    assert sums.rows[-1][1] == f"{total_s:.2f}"
    assert total_parts(w.first for w in waits).total() == pytest.approx(total_s)
    _, longest = tables(waits, "longest", 99)
    assert len(longest.rows) == 3  # one has a single token


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_who_has_ended_does_not_begin_again(depth: int, tmp_path: Path) -> None:
    """Though a step that was in flight at its end still holds it."""
    records = recorded_run([(0.0, 9, 30), (0.0, 5, 30), (0.1, 9, 30)], depth=depth, is_random=True)
    stories = list(read_stories(write(tmp_path / "t.jsonl", records)))
    assert sorted(story.request_id for story in stories) == ["0", "1", "2"]
    for story in stories:
        assert story.ended is not None
        assert len(Attribution(story).told_s) == story.ended.num_output_tokens < 30
