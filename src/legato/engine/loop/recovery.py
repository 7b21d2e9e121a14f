"""Recovers from a step that raises: finds the requests that cause it, and lets the others go on.

Nothing of a failed step is kept. The next attempt writes its keys and values again. The random
number of a token depends on its request's seed and position alone, so that failed attempts change
outputs no more than other batches do: where logits are so close that another order of sums decides.
"""

import logging
from collections.abc import Callable

import msgspec

from legato.core.plan import Fault, ScheduledChunk, StepPlan, StepResult
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.executor import Executor

logger = logging.getLogger(__name__)

_LOST_DEVICE_SIGNS = (
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "device-side assert triggered",
    "hardware stack error",
    "invalid program counter",
    "misaligned address",
    "operation not supported on global/shared address space",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "unspecified launch failure",
)
"""CUDA's messages of errors that every later call of the process reports again."""

_CANARY = AddRequest(
    request_id="canary",
    prompt_token_ids=token_array((0,)),
    params=SamplingParams(temperature=0.0, max_tokens=1, seed=0),
)


def begin(executor: Executor, plan: StepPlan, prepare: Callable[[], None]) -> Fault | None:
    """Call `prepare`, then submit a step; return its fault if either raises."""
    try:
        prepare()
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


def attempt(
    executor: Executor, plan: StepPlan, prepare: Callable[[], None] = lambda: None
) -> StepResult | Fault:
    """Call `prepare`, then run a step; no other may be in flight."""
    return begin(executor, plan, prepare) or collect(executor, plan)


def _fault(plan: StepPlan, error: Exception) -> Fault:
    num_requests = len(plan.chunks)
    told = "step %d failed with %d requests: %r"
    # For a single request log the traceback, too: it ends by this fault.
    logger.error(told, plan.step_id, num_requests, error, exc_info=num_requests == 1)
    return Fault(
        f"{type(error).__name__}: {error}",
        is_out_of_memory=isinstance(error, MemoryError),
        is_device_lost=is_device_lost(error),
    )


def is_device_lost(error: Exception) -> bool:
    """Whether the device reports this error to every later call of the process, too."""
    return isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in _LOST_DEVICE_SIGNS
    )


def run_in_parts(executor: Executor, plan: StepPlan, fault: Fault) -> StepResult:
    """Run a failed step in halves, and failed halves again, down to requests that fail alone.

    No request fails because of its drafts: a request alone runs without them. All requests fail
    if the device is lost, and nothing is run again.

    Returns:
        The results of the other requests, and `faults` of the failed requests.
    """
    if fault.is_device_lost:
        return all_failed(plan, fault)
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
    rest = plan.part(plan.chunks[middle:])
    lost = lost_device(left)
    right = _run_part(executor, rest) if lost is None else run_in_parts(executor, rest, lost)
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


def all_failed(plan: StepPlan, fault: Fault) -> StepResult:
    """Return the result of a step that failed for all its requests."""
    faults = {chunk.request_id: fault for chunk in plan.chunks}
    return StepResult(step_id=plan.step_id, seconds=0.0, faults=faults)


def lost_device(result: StepResult) -> Fault | None:
    """Return the fault of a result that lost the device; None without one."""
    return next((fault for fault in result.faults.values() if fault.is_device_lost), None)


def _run_part(executor: Executor, part: StepPlan) -> StepResult:
    """Run a step; if it fails, run it in parts."""
    result = attempt(executor, part)
    return run_in_parts(executor, part, result) if isinstance(result, Fault) else result
