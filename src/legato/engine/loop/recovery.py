"""Recovers from a step that raises: finds the requests that cause it, and lets the others go on.

Nothing of a failed step is kept. The next attempt writes its keys and values again. A sampled token
depends on its request's seed and position alone, so that failed attempts do not change outputs.
"""

import logging

import msgspec

from legato.core.plan import Fault, ScheduledChunk, StepPlan, StepResult
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.base import Executor

logger = logging.getLogger(__name__)

_CANARY = AddRequest(
    request_id="canary",
    prompt_token_ids=token_array((0,)),
    params=SamplingParams(temperature=0.0, max_tokens=1, seed=0),
)


def submit(executor: Executor, plan: StepPlan) -> Fault | None:
    """Submit a step; return its fault if that raises."""
    try:
        executor.submit(plan)
    except Exception as error:
        return _fault(plan, error)
    return None


def collect(executor: Executor, plan: StepPlan) -> StepResult | Fault:
    """Wait for the oldest submitted step."""
    try:
        return executor.collect()
    except Exception as error:
        return _fault(plan, error)


def attempt(executor: Executor, plan: StepPlan) -> StepResult | Fault:
    """Run a step; no other may be in flight."""
    return submit(executor, plan) or collect(executor, plan)


def _fault(plan: StepPlan, error: Exception) -> Fault:
    num_requests = len(plan.chunks)
    told = "step %d failed with %d requests: %r"
    # For a single request log the traceback, too: it ends by this fault.
    logger.error(told, plan.step_id, num_requests, error, exc_info=num_requests == 1)
    return Fault(f"{type(error).__name__}: {error}", isinstance(error, MemoryError))


def run_in_parts(executor: Executor, plan: StepPlan, fault: Fault) -> StepResult:
    """Run a failed step in halves, and failed halves again, down to requests that fail alone.

    No request fails because of its drafts: a request alone runs without them.

    Returns:
        The results of the other requests, and `faults` of the failed requests.
    """
    if len(plan.chunks) == 1 and plan.chunks[0].draft_token_ids:
        result = _run_part(executor, plan.part([plan.chunks[0].without_drafts]))
        ran_out_of_memory = result.ran_out_of_memory or fault.is_out_of_memory
        return msgspec.structs.replace(result, ran_out_of_memory=ran_out_of_memory)
    if len(plan.chunks) == 1:
        return StepResult(
            step_id=plan.step_id,
            seconds=0.0,
            faults={plan.chunks[0].request_id: fault},
            ran_out_of_memory=fault.is_out_of_memory,
        )
    middle = len(plan.chunks) // 2
    left = _run_part(executor, plan.part(plan.chunks[:middle]))
    right = _run_part(executor, plan.part(plan.chunks[middle:]))
    return StepResult(
        step_id=plan.step_id,
        seconds=left.seconds + right.seconds,
        chunks=left.chunks | right.chunks,
        faults=left.faults | right.faults,
        ran_out_of_memory=any(
            (fault.is_out_of_memory, left.ran_out_of_memory, right.ran_out_of_memory)
        ),
    )


def is_sound(executor: Executor, plan: StepPlan) -> bool:
    """Return whether an executor still computes a sound request of one token.

    Args:
        plan: a step all of whose requests failed. The test writes to the last blocks of one
            request; each has tokens that are not computed yet, so that no other request reads it.
    """
    failed = plan.chunks[0]
    chunk = ScheduledChunk(
        _CANARY.request_id,
        0,
        1,
        failed.block_ids[-1:],
        1,
        "prefill",
        "prompt_end",
        window_block_ids=tuple(block_ids[-1:] for block_ids in failed.window_block_ids),
    )
    canary = StepPlan(step_id=plan.step_id, chunks=(chunk,), new_requests=(_CANARY,))
    return isinstance(attempt(executor, canary), StepResult)


def _run_part(executor: Executor, part: StepPlan) -> StepResult:
    result = attempt(executor, part)
    return run_in_parts(executor, part, result) if isinstance(result, Fault) else result
