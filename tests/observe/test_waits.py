"""All requests of a trace, side by side."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from legato.cli.explain_all import tables
from legato.core.step_record import EngineRecord, RequestArrived
from legato.observe.traces.attribution import (
    Attribution,
    Cause,
    Span,
    Waits,
    read_waits,
    total_parts,
    waits_of,
)
from legato.observe.traces.request_story import read_stories, read_story
from legato.observe.traces.trace_file import JsonlTrace, TraceHeader
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


def waits_in(records: list[EngineRecord]) -> list[Waits]:
    with TemporaryDirectory() as folder:
        return list(read_waits(write(Path(folder) / "t.jsonl", records)))


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
    """Earlier requests have gaps, and unfinished ones are listed."""
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


def test_requests_that_waited_alike_are_one_row() -> None:
    """Twelve streams are prefilled four at a time; a prompt comes alone."""
    arrivals = [*[(0.0, 60 + i % 5, 20) for i in range(12)], (2.0, 200, 4)]
    waits = waits_in(recorded_run(arrivals, budget=256, num_blocks=1000, max_num_seqs=16))
    _, longest = tables(waits, "longest", 20)
    assert sum(int(row[1] or 1) for row in longest.rows) == len(arrivals)
    assert len(longest.rows) < 6
    assert longest.rows[0][:2] == ["0", "4"]
    assert longest.rows[0][3:5] == ["60–63", "20"]
    [alone] = [row for row in longest.rows if row[0] == "12"]
    assert alone[1:4] == ["", "interactive", "200"]
    _, longest = tables(waits, "longest", 1)
    assert [row[:2] for row in longest.rows] == [["0", "4"]]


def test_who_waited_otherwise_has_a_row_of_its_own() -> None:
    [waits] = waits_in(recorded_run([(0.0, 64, 3)]))
    assert waits.first is not None
    assert waits.longest is not None

    def longer(span: Span, factor: float) -> Span:
        parts = {cause: factor * seconds for cause, seconds in span.parts.items()}
        return span._replace(end_s=span.start_s + factor * span.seconds, parts=parts)

    def cells(other: Waits) -> list[str]:
        _, longest = tables([waits, other], "first", 20)
        return [row[1] for row in longest.rows]

    assert cells(waits._replace(name="1", first=longer(waits.first, 0.97))) == ["2"]
    others_prefill: dict[Cause, float] = {"others_prefill": waits.longest.seconds}
    for differing in (
        waits._replace(first=longer(waits.first, 0.9)),
        waits._replace(longest=longer(waits.longest, 0.9)),
        waits._replace(longest=waits.longest._replace(parts=others_prefill)),
        waits._replace(longest=None),
        waits._replace(slo_class="batch"),
    ):
        assert cells(differing) == ["", ""]


def test_drafts_of_requests_that_waited_alike_are_told_together() -> None:
    arrivals = [(0.0, 8, 21), (0.0, 8, 21), (0.0, 8, 1)]
    waits = waits_in(recorded_run(arrivals, speculative=4, vocab_size=1, budget=64))
    both = [request.drafted for request in waits if request.name != "2"]
    right = sum(drafted.num_accepted.total() for drafted in both)
    assert right + sum(drafted.num_steps for drafted in both) == 2 * 20
    _, longest = tables(waits, "longest", 20)
    told = f"{right} of {sum(drafted.num_drafts.total() for drafted in both)} right"
    mean = 2 * 20 / sum(drafted.num_steps for drafted in both)
    row = ["0", "2", "interactive", "8", "21", f"{told}, {mean:.2f} tokens a step"]
    assert longest.rows[0][:6] == row
    _, by_ttft = tables(waits, "first", 20)
    assert {row[0]: row[5] for row in by_ttft.rows}["2"] == ""


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_who_has_ended_does_not_begin_again(depth: int, tmp_path: Path) -> None:
    """Though a step that was in flight at its end still holds it."""
    records = recorded_run([(0.0, 9, 30), (0.0, 5, 30), (0.1, 9, 30)], depth=depth, is_random=True)
    stories = list(read_stories(write(tmp_path / "t.jsonl", records)))
    assert sorted(story.request_id for story in stories) == ["0", "1", "2"]
    for story in stories:
        assert story.ended is not None
        assert len(Attribution(story).told_s) == story.ended.num_output_tokens < 30
