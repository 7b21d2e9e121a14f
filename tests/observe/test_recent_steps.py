"""The latest steps, in bounded memory."""

from legato.core.step_record import ChunkRecord, StepRecord
from legato.observe.traces.feed import RecentSteps


def step(step_id: int, num_chunks: int) -> StepRecord:
    chunk = ChunkRecord("a", 0, 1, 1, "decode", None)
    return StepRecord(
        step_id=step_id,
        planned_s=0.0,
        started_s=0.0,
        ended_s=0.0,
        seconds=0.0,
        predicted_s=None,
        limit_s=None,
        budget_tokens=1,
        chunks=(chunk,) * num_chunks,
        admitted={},
        preempted=(),
        held_by=None,
        failed=(),
        ran_out_of_memory=False,
        num_running=1,
        num_waiting=0,
        num_blocks=1,
        num_used_blocks=1,
        num_cached_blocks=0,
    )


def test_as_many_are_kept_as_have_few_chunks() -> None:
    recent = RecentSteps()
    for step_id in range(10):
        recent.note(step(step_id, 1000))
    assert [kept.step_id for kept in recent.steps] == [6, 7, 8, 9]
    recent.note(step(10, 1))
    assert [kept.step_id for kept in recent.steps] == [6, 7, 8, 9, 10]
    recent.note(step(11, 5000))
    assert recent.steps == ()
    recent.note(step(12, 4096))
    assert [kept.step_id for kept in recent.steps] == [12]
    recent.clear()
    recent.note(step(0, 4096))
    assert [kept.step_id for kept in recent.steps] == [0]
