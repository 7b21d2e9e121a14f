"""Records hold all that happened; without a reader, only the latest step."""

from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AbortRequest
from legato.core.step_record import (
    EngineRecord,
    RequestArrived,
    RequestEnded,
    StepBegun,
    StepRecord,
)
from tests.engine.test_engine_loop import Engine, drain, request, tokens


def recorded(engine: Engine) -> tuple[list[RequestOutput], list[EngineRecord]]:
    """What is left to be done, and all records."""
    outputs, records = drain(engine), engine.take_records()
    assert engine.take_records() == []
    return outputs, records


def kinds(records: list[EngineRecord]) -> list[list[str]]:
    """Of the chunks of all records, which must be steps'."""
    assert all(isinstance(record, StepRecord) for record in records)
    return [[chunk.kind for chunk in r.chunks] for r in records if isinstance(r, StepRecord)]


def test_only_the_latest_step_is_kept_unless_asked_for() -> None:
    engine = Engine()
    engine.step([request("a", 8)])
    assert kinds(engine.take_records()) == [["prefill"]]
    engine.step()
    engine.step([request("b", 8), AbortRequest(request_id="a")])
    assert kinds(engine.take_records()) == [["prefill"]]
    assert engine.take_records() == []
    engine.set_recording(is_on=True)
    engine.step()
    engine.step()
    assert kinds(engine.take_records()) == [["decode"], ["decode"]]
    engine.set_recording(is_on=False)
    drain(engine)
    assert kinds(engine.take_records()) == [["decode"]]


def test_faults_are_recorded() -> None:
    engine = Engine()
    engine.set_recording(is_on=True)
    engine.step([request("a", 8), request("poison", 8)])
    _, _, step, ended = engine.take_records()
    assert isinstance(step, StepRecord)
    assert step.failed == ("poison",)
    assert isinstance(ended, RequestEnded)
    assert (ended.finish_reason, ended.error) == (FinishReason.ERROR, "ValueError: boom")


def test_a_step_is_told_of_before_it_is_computed() -> None:
    engine = Engine()
    told: list[tuple[StepBegun, float]] = []
    engine.announce_steps(lambda step: told.append((step, engine.clock())))
    engine.set_recording(is_on=True)
    engine.step([request("a", 8), request("b", 20)])
    engine.step()
    (first, first_told_s), (second, _) = told
    assert first.prefill_tokens == {"a": 8, "b": 20}
    assert (first.num_decode_tokens, second.num_decode_tokens) == (0, 2)
    steps = [record for record in engine.take_records() if isinstance(record, StepRecord)]
    assert first_told_s < steps[0].ended_s
    for (begun, _), step in zip(told, steps, strict=True):
        assert (begun.step_id, begun.planned_s) == (step.step_id, step.planned_s)
        assert (begun.predicted_s, begun.limit_s) == (step.predicted_s, step.limit_s)
        assert begun.budget_tokens == step.budget_tokens
    engine.announce_steps(None)
    engine.step()
    assert len(told) == 2


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8), budget=st.integers(1, 100))
def test_records_account_for_every_token(lengths: list[int], budget: int) -> None:
    engine = Engine(budget=budget)
    engine.set_recording(is_on=True)
    outputs = engine.step([request(str(i), length) for i, length in enumerate(lengths)])
    more, records = recorded(engine)
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
