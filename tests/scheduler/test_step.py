"""A step says how much still fits, and takes one chunk of each request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.request import Request
from legato.kv.manager import KVCacheManager
from legato.scheduler.budget import StepBudget
from legato.scheduler.step import Step
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from legato.speculation.drafter import Draft
from tests.kv import windowed
from tests.kv.requests import request_for
from tests.profiles import examples
from tests.scheduler.requests import waiting_request
from tests.scheduler.step_times import calibrate

BLOCK_SIZE = 4


def step_and_stream(num_blocks: int) -> tuple[Step, Request]:
    """A step with the next token of a stream whose 6 tokens lie in two blocks."""
    kv = KVCacheManager(num_blocks, BLOCK_SIZE)
    request = request_for("a", range(6))
    assert kv.reserve(request)
    request.num_scheduled_tokens = request.num_computed_tokens = 5
    step = Step(kv, StepBudget(StepTimeModel(), 20))
    step.add_decodes([request])
    return step, request


def test_a_request_has_one_chunk() -> None:
    step, request = step_and_stream(3)
    assert request in step
    with pytest.raises(AssertionError, match="one chunk"):
        step.add_prefill(request, 1, "prompt_end")
    with pytest.raises(AssertionError, match="one chunk"):
        step.add_decodes([request])


def test_a_chunk_takes_room() -> None:
    step, request = step_and_stream(3)
    assert step.prefill_room(0, 100) == 19
    step.add_drafts(request, Draft("model", [1, 2], [0.5, 0.5]), 2)
    assert step.prefill_room(0, 100) == 17
    step.is_for_streams = True
    assert not step.prefill_room(0, 100)


@pytest.mark.parametrize(("num_blocks", "num_added"), [(2, 2), (3, 4)])
def test_drafts_fit_into_free_blocks(num_blocks: int, num_added: int) -> None:
    step, request = step_and_stream(num_blocks)
    has_room = step.add_drafts(request, Draft("model", [1, 2, 3, 4], [0.5] * 4), 4)
    assert has_room == (num_added == 4)
    (chunk,) = step.chunks
    assert chunk.draft_token_ids == (1, 2, 3, 4)[:num_added]
    assert len(chunk.block_ids) == num_blocks
    assert (chunk.start, chunk.end) == (5, 6 + num_added)
    assert request.num_scheduled_tokens == chunk.end
    assert request.num_expected_tokens == chunk.end + 1


def test_time_spent_on_drafts_is_no_longer_left() -> None:
    step = Step(
        KVCacheManager(3, BLOCK_SIZE), StepBudget(StepTimeModel(), 20), limit_s=0.5, is_due=True
    )
    step.spend(0.125)
    assert (step.limit_s, step.drafting_s) == (0.375, 0.125)


def test_a_chunk_without_blocks_of_windows_changes_nothing() -> None:
    kv = windowed.manager()
    assert kv.windows is not None
    request = request_for("a", range(8))
    assert kv.reserve(request)
    taken = kv.windows.borrow()
    step = Step(kv, StepBudget(StepTimeModel(), 20))
    assert not step.add_prefill(request, 8, "prompt_end")
    assert request not in step
    assert (step.chunks, step.first_blocks, step.becoming_streams) == ([], {}, [])
    assert not step.shape.num_tokens
    assert (request.num_scheduled_tokens, request.num_expected_tokens) == (0, 8)
    kv.windows.give_back(taken)
    assert step.add_prefill(request, 8, "prompt_end")
    assert step.becoming_streams == [request]
    [chunk] = step.chunks
    assert [len(table) for table in chunk.window_block_ids] == [4, 4]


COSTS = StepCosts(step_s=0.01, row_s=(1e-4,) * 5, decode_row_s=1e-3, decode_context_s=1e-6)
MODEL = StepTimeModel(calibrate(COSTS, 4000))


@given(
    contexts=st.lists(st.sampled_from([1, 100, 10_000, 100_000]), min_size=1, max_size=40),
    limit_s=st.floats(-0.01, 0.1),
)
@examples(100)
def test_as_many_streams_fit_as_end_in_time_one_more_at_a_time(
    contexts: list[int], limit_s: float
) -> None:
    budget, num_fitting, shape = StepBudget(MODEL, 64), 0, StepShape()
    for context in contexts:
        shape.add_decode(context)
        if not budget.fits_decode(shape, limit_s):
            break
        num_fitting += 1
    step = Step(KVCacheManager(8, BLOCK_SIZE), budget, limit_s=limit_s)
    streams = [waiting_request(prompt_len=context) for context in contexts]
    assert step.num_fitting(streams) == num_fitting
