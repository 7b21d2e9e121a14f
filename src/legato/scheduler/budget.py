"""Bounds on the work of one step."""

import math
from typing import Protocol

from legato.core.config import SchedulerConfig
from legato.core.step_record import DraftsEndedBy, EndedBy
from legato.scheduler.step_costs import ROW_BOUNDS
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel

_SMALL_CHUNK = 32
"""Prefill tokens of a step while their cost is unknown; the most if the decodes leave no margin."""

MIN_CHUNK = ROW_BOUNDS[0]
"""A shorter chunk costs hardly less than one of this many tokens. Prompts get so many even if the
decodes alone break the promise."""

_NEGLIGIBLE = 0.1
"""Share by which streams may always lengthen the step of one stream. The machine's noise breaks a
promise with less room than that anyway."""

_CALM_S = 30.0
"""Time without running out after which the limit on prefill tokens doubles."""

UNLIMITED = math.inf


class StepBudget(Protocol):
    """Decides what still fits into a step, from its contents and its time limit.

    docs/contributing/scheduler.md tells how `limit_s` follows from the promises; it is `UNLIMITED`
    without any.
    """

    def max_chunk(self, shape: StepShape, start: int, wanted: int, limit_s: float) -> int:
        """Return the most prefill tokens, up to `wanted`, for a chunk at position `start`."""
        ...

    def bound(self, shape: StepShape, num_tokens: int) -> EndedBy:
        """Return the limit that stops a prefill chunk at `num_tokens`, the most that fit."""
        ...

    def fits_decode(self, shape: StepShape, limit_s: float) -> bool:
        """Whether the step, its decodes included, ends in time."""
        ...

    def drafts_bound(self, shape: StepShape, limit_s: float) -> DraftsEndedBy | None:
        """Return the limit that the step exceeds with its drafts; None if they fit."""
        ...

    def keeps_pace(self, streams: StepShape, limit_s: float) -> bool:
        """Whether steps of these decodes end in time at the machine's usual speed.

        True for one stream, and for all streams that a tighter limit accepts.

        Args:
            limit_s: seconds between two tokens of a stream.
        """
        ...

    def is_exceeded(self, shape: StepShape, limit_s: float) -> bool:
        """Whether the step is over budget, which many decodes alone can cause."""
        ...

    def explain(self, shape: StepShape, limit_s: float) -> str:
        """Describe the promise that a step over budget breaks; empty if it breaks none."""
        ...


class TokenBudget:
    """A fixed number of tokens a step, as in Sarathi-Serve (Agrawal et al., OSDI 2024)."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens

    def max_chunk(
        self,
        shape: StepShape,
        start: int,  # noqa: ARG002
        wanted: int,
        limit_s: float,  # noqa: ARG002
    ) -> int:
        # Decodes alone may exceed the budget: prefill is then 0, never negative.
        return max(0, min(wanted, self.max_num_batched_tokens - shape.num_tokens))

    def bound(self, shape: StepShape, num_tokens: int) -> EndedBy:  # noqa: ARG002
        return "token_budget"

    def fits_decode(self, shape: StepShape, limit_s: float) -> bool:  # noqa: ARG002
        return True

    def drafts_bound(self, shape: StepShape, limit_s: float) -> DraftsEndedBy | None:
        return "token_budget" if self.is_exceeded(shape, limit_s) else None

    def keeps_pace(self, streams: StepShape, limit_s: float) -> bool:  # noqa: ARG002
        return True

    def is_exceeded(self, shape: StepShape, limit_s: float) -> bool:  # noqa: ARG002
        return shape.num_tokens > self.max_num_batched_tokens

    def explain(self, shape: StepShape, limit_s: float) -> str:  # noqa: ARG002
        return ""


class TimeBudget:
    """Bounds a step by its predicted time.

    The step-time model is inverted for the longest chunk whose step, plus the model's margin, ends
    within the limit. Without a limit, only `max_num_batched_tokens` bounds the step.
    """

    def __init__(self, model: StepTimeModel, max_num_batched_tokens: int) -> None:
        self._model = model
        self._tokens = TokenBudget(max_num_batched_tokens)

    def max_chunk(self, shape: StepShape, start: int, wanted: int, limit_s: float) -> int:
        cap = self._tokens.max_chunk(shape, start, wanted, limit_s)
        if limit_s == UNLIMITED or not cap:
            return cap
        small = max(0, min(cap, _SMALL_CHUNK - shape.num_prefill_tokens))
        if not self._model.is_known:
            return small
        if self._is_lost(shape, limit_s):
            fitting = self._model.longest_chunk(shape, start, limit_s, cap, has_margin=False)
            return min(small, max(fitting, MIN_CHUNK - shape.num_prefill_tokens))
        chunk = self._model.longest_chunk(shape, start, limit_s, cap)
        # A tiny chunk of a second prompt costs more than it gains; one of the first prompt is all
        # that the promise leaves room for.
        is_crumb = chunk < min(wanted, MIN_CHUNK) and shape.num_prefill_chunks > 0
        return 0 if is_crumb else chunk

    def bound(self, shape: StepShape, num_tokens: int) -> EndedBy:
        is_full = shape.num_tokens + num_tokens >= self._tokens.max_num_batched_tokens
        return "token_budget" if is_full else "time_budget"

    def fits_decode(self, shape: StepShape, limit_s: float) -> bool:
        if shape.num_prefill_tokens and self._tokens.is_exceeded(shape, limit_s):
            return False
        if limit_s == UNLIMITED or not self._model.is_known:
            return True
        return self._model.seconds(shape) * self._model.safety_factor(limit_s) <= limit_s

    def drafts_bound(self, shape: StepShape, limit_s: float) -> DraftsEndedBy | None:
        if limit_s < UNLIMITED:
            # No stream's token may be late because of a draft.
            safety_factor = self._model.safety_factor(limit_s)
            if not self._model.is_known or self._model.seconds(shape) * safety_factor > limit_s:
                return "time_budget"
        return self._tokens.drafts_bound(shape, limit_s)

    def keeps_pace(self, streams: StepShape, limit_s: float) -> bool:
        if limit_s == UNLIMITED or streams.num_decode_rows == 1 or not self._model.is_known:
            return True
        alone = StepShape()
        alone.add_decode(streams.decode_context / streams.num_decode_rows)
        alone_s = self._model.seconds(alone)
        return self._model.seconds(streams) <= max(
            limit_s / (1.0 + self._model.margin_at(limit_s)),
            # If one stream's room is less than twice the margin, the margin is half of that room.
            limit_s / (0.5 + 0.5 * limit_s / alone_s),
            (1.0 + _NEGLIGIBLE) * alone_s,
        )

    def is_exceeded(self, shape: StepShape, limit_s: float) -> bool:
        if limit_s == UNLIMITED or not self._model.is_known:
            return False
        return self._model.seconds(shape) > limit_s

    def explain(self, shape: StepShape, limit_s: float) -> str:
        return (
            f"a step with the tokens of {shape.num_decode_rows} running streams takes "
            f"{1e3 * self._model.seconds(shape):.0f} ms, but the next is due in "
            f"{1e3 * limit_s:.0f} ms"
        )

    def _is_lost(self, shape: StepShape, limit_s: float) -> bool:
        """Whether the decodes alone leave no margin, for example on a machine that slowed down."""
        decodes = StepShape()
        decodes.num_decode_rows = decodes.num_samples = shape.num_decode_rows
        decodes.decode_context = shape.decode_context
        return not self.fits_decode(decodes, limit_s)


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

    def keeps_pace(self, streams: StepShape, limit_s: float) -> bool:
        return self._budget.keeps_pace(streams, limit_s)

    def is_exceeded(self, shape: StepShape, limit_s: float) -> bool:
        return self._budget.is_exceeded(shape, limit_s)

    def explain(self, shape: StepShape, limit_s: float) -> str:
        return self._budget.explain(shape, limit_s)


def step_budget(config: SchedulerConfig, step_time: StepTimeModel) -> MemoryBudget:
    """Return the budget of steps under a configuration, which is resolved."""
    assert config.max_num_batched_tokens is not None
    if config.promises_pace:
        return MemoryBudget(TimeBudget(step_time, config.max_num_batched_tokens))
    return MemoryBudget(TokenBudget(config.max_num_batched_tokens))
