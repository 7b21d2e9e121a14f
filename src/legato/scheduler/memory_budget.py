"""Shortens chunks after a step ran out of memory."""

from legato.core.step_record import DraftsEndedBy, EndedBy
from legato.scheduler.budget import MIN_CHUNK, UNLIMITED, StepBudget
from legato.scheduler.step_shape import StepShape

_CALM_S = 30.0
"""Time without running out after which the limit on prefill tokens doubles."""


class MemoryBudget:
    """A step budget with a limit on prefill tokens, which exists only after memory ran out."""

    def __init__(self, budget: StepBudget) -> None:
        self._budget = budget
        self._ran_out_at = 0  # the largest number of prefill tokens that was too many
        self._limit: float = UNLIMITED  # tokens
        self._changed_s = 0.0

    def lower(self, num_prefill_tokens: int, now_s: float) -> None:
        """Lower the limit after a step with `num_prefill_tokens` ran out of memory."""
        self._ran_out_at = max(self._ran_out_at, num_prefill_tokens)
        self._limit = max(MIN_CHUNK, num_prefill_tokens // 2)
        self._changed_s = now_s

    def recover(self, now_s: float) -> None:
        """Double the limit when it is time to, and drop it in the end."""
        if self._limit == UNLIMITED or now_s - self._changed_s < _CALM_S:
            return
        self._limit *= 2
        self._changed_s = now_s
        if self._limit >= self._ran_out_at:
            self._limit, self._ran_out_at = UNLIMITED, 0

    def max_chunk(self, shape: StepShape, start: int, wanted: int, limit_s: float) -> int:
        chunk = self._budget.max_chunk(shape, start, wanted, limit_s)
        return int(max(0, min(chunk, self._limit - shape.num_prefill_tokens)))

    def bound(self, shape: StepShape, num_tokens: int) -> EndedBy:
        is_full = shape.num_prefill_tokens + num_tokens >= self._limit
        return "memory" if is_full else self._budget.bound(shape, num_tokens)

    def fits_decode(self, shape: StepShape, limit_s: float) -> bool:
        return self._budget.fits_decode(shape, limit_s)

    def drafts_bound(self, shape: StepShape, limit_s: float) -> DraftsEndedBy | None:
        if self._limit < UNLIMITED:
            return "memory"  # drafts may have caused the shortage
        return self._budget.drafts_bound(shape, limit_s)

    def paces(self, streams: StepShape, limit_s: float) -> bool:
        return self._budget.paces(streams, limit_s)

    def is_exceeded(self, shape: StepShape, limit_s: float) -> bool:
        return self._budget.is_exceeded(shape, limit_s)

    def explain(self, shape: StepShape, limit_s: float) -> str:
        return self._budget.explain(shape, limit_s)
