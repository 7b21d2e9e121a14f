"""Records tell all that happened, and nothing is made of them where nobody asks."""

from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from legato.core.outputs import FinishReason, RequestOutput
from legato.core.step_record import EngineRecord, RequestArrived, RequestEnded, StepRecord
from tests.engine.test_core import Engine, drain, request, tokens


def recorded(core: Engine) -> tuple[list[RequestOutput], list[EngineRecord]]:
    """What is left to be done, and all records."""
    outputs, records = drain(core), core.take_records()
    assert core.take_records() == []
    return outputs, records


def test_nothing_is_recorded_unless_asked_for() -> None:
    core = Engine()
    core.step([request("a", 8)])
    assert core.take_records() == []
    core.set_recording(is_on=True)
    core.step()
    [step] = core.take_records()
    assert isinstance(step, StepRecord)
    assert [chunk.ended_by for chunk in step.chunks] == ["decode"]
    core.set_recording(is_on=False)
    drain(core)
    assert core.take_records() == []


def test_faults_are_recorded() -> None:
    core = Engine()
    core.set_recording(is_on=True)
    core.step([request("a", 8), request("poison", 8)])
    _, _, step, ended = core.take_records()
    assert isinstance(step, StepRecord)
    assert step.failed == ("poison",)
    assert isinstance(ended, RequestEnded)
    assert (ended.finish_reason, ended.error) == (FinishReason.ERROR, "ValueError: boom")


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8), budget=st.integers(1, 100))
def test_records_account_for_every_token(lengths: list[int], budget: int) -> None:
    core = Engine(budget=budget)
    core.set_recording(is_on=True)
    outputs = core.step([request(str(i), length) for i, length in enumerate(lengths)])
    more, records = recorded(core)
    outputs += more
    steps = [record for record in records if isinstance(record, StepRecord)]
    chunks = defaultdict(list)
    for step in steps:
        assert step.planned_s <= step.started_s <= step.ended_s
        assert 0 < step.num_used_blocks + step.num_cached_blocks <= step.num_blocks
        assert sum(chunk.num_tokens for chunk in step.chunks) <= max(budget, len(step.chunks))
        for chunk in step.chunks:
            chunks[chunk.request_id].append(chunk)
    assert [step.step_id for step in steps] == list(range(len(steps)))
    assert [step for step, after in pairwise(steps) if step.ended_s > after.planned_s] == []
    arrived = {r.request_id: r for r in records if isinstance(r, RequestArrived)}
    ended = {r.request_id: r for r in records if isinstance(r, RequestEnded)}
    for i, length in enumerate(lengths):
        name = str(i)
        assert arrived[name].num_prompt_tokens == length
        assert ended[name].num_output_tokens == len(tokens(outputs, name))
        assert sum(chunk.num_samples for chunk in chunks[name]) == len(tokens(outputs, name))
        assert chunks[name][0].start == next(s.admitted[name] for s in steps if name in s.admitted)
        for chunk, after in pairwise(chunks[name]):
            assert after.start == chunk.start + chunk.num_tokens
