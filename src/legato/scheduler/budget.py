"""Bounds on the work of one step."""

import math

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

_LONGEST_IDLE_S, _IDLE_STEPS = 0.5, 4.0
"""Longest step while no token is due, unless the machine takes more than a quarter of that for a
step without prompts: shorter ones would spend too much of their time on reading the weights."""

_UNNOTICED_STEPS, _UNNOTICED_S = 8.0, (0.05, 0.25)
"""A gap that a reader does not notice without a promise: so many steps of the streams alone, within
these bounds, but at least two steps, or prompts would starve."""

_CALM_S = 30.0
"""Time without running out after which the limit on prefill tokens doubles."""

UNLIMITED = math.inf


class StepBudget:
    """Decides what still fits into a step, from its contents and its time limit.

    A step has at most `max_num_batched_tokens`, as in Sarathi-Serve (Agrawal et al., OSDI 2024).
    The step-time model, once it is known, is inverted for the longest chunk whose step, plus the
    model's margin, ends within the limit. After memory ran out there is a limit on prefill tokens,
    too. docs/contributing/scheduler.md tells how `limit_s` follows from the promises; it is
    `UNLIMITED` without any.

    Args:
        is_chunked: whether a prompt may be computed in several steps.
        bounds_gaps: whether steps beside streams are short without a promise.
    """

    def __init__(
        self,
        model: StepTimeModel,
        max_num_batched_tokens: int,
        *,
        is_chunked: bool = True,
        bounds_gaps: bool = False,
    ) -> None:
        self._bounds_gaps = bounds_gaps
        self._model = model
        self._is_chunked = is_chunked
        self._most_tokens = max_num_batched_tokens
        self._ran_out_at = 0  # the largest number of prefill tokens that was too many for memory
        self._most_prefill: float = UNLIMITED  # tokens
        self._changed_s = 0.0

    @property
    def most_tokens(self) -> int:
        """Most tokens that a step may have."""
        return self._most_tokens

    def lower(self, num_prefill_tokens: int, now_s: float) -> None:
        """Lower the limit on prefill tokens: a step with so many ran out of memory."""
        self._ran_out_at = max(self._ran_out_at, num_prefill_tokens)
        self._most_prefill = max(MIN_CHUNK, num_prefill_tokens // 2)
        self._changed_s = now_s

    def recover(self, now_s: float) -> None:
        """Double that limit when it is time to, and drop it in the end."""
        if self._most_prefill == UNLIMITED or now_s - self._changed_s < _CALM_S:
            return
        self._most_prefill *= 2
        self._changed_s = now_s
        if self._most_prefill >= self._ran_out_at:
            self._most_prefill, self._ran_out_at = UNLIMITED, 0

    def max_chunk(self, shape: StepShape, start: int, wanted: int, limit_s: float) -> int:
        """Return the most prefill tokens, up to `wanted`, for a chunk at position `start`."""
        # Decodes alone may exceed the budget: prefill is then 0, never negative.
        most = min(
            self._most_tokens - shape.num_tokens, self._most_prefill - shape.num_prefill_tokens
        )
        cap = int(max(0, min(wanted, most)))
        return self._in_time(shape, start, cap, limit_s) if cap else 0

    def _in_time(self, shape: StepShape, start: int, cap: int, limit_s: float) -> int:
        """Return the most prefill tokens, up to `cap`, for which there is time."""
        small = max(0, min(cap, _SMALL_CHUNK - shape.num_prefill_tokens))
        is_free = limit_s == UNLIMITED and not (self._bounds_gaps and shape.num_decode_rows)
        if not self._is_chunked or (is_free and not self._model.is_known):
            return cap
        if not self._model.is_known:
            return small
        if limit_s == UNLIMITED:
            unpromised_s = self._unpromised_s(shape.without_prefill())
            fitting = self._model.longest_chunk(shape, start, unpromised_s, cap, has_margin=False)
            # Deep in a long prompt, reading its keys may take all of that time.
            return max(fitting, min(cap, MIN_CHUNK - shape.num_prefill_tokens))
        if self._is_lost(shape, limit_s):
            fitting = self._model.longest_chunk(shape, start, limit_s, cap, has_margin=False)
            return min(small, max(fitting, MIN_CHUNK - shape.num_prefill_tokens))
        chunk = self._model.longest_chunk(shape, start, limit_s, cap)
        # A tiny chunk of a second prompt costs more than it gains; one of the first prompt is all
        # that the promise leaves room for.
        is_crumb = chunk < min(cap, MIN_CHUNK) and shape.num_prefill_chunks > 0
        return 0 if is_crumb else chunk

    def _unpromised_s(self, streams: StepShape) -> float:
        """Return the longest step beside streams without a promise; a new request waits for it."""
        streams_s = self._model.seconds(streams)
        if not (self._bounds_gaps and streams.num_decode_rows):
            return max(_LONGEST_IDLE_S, _IDLE_STEPS * streams_s)
        least_s, most_s = _UNNOTICED_S
        return max(2.0 * streams_s, min(max(_UNNOTICED_STEPS * streams_s, least_s), most_s))

    def prompt_s(self, num_tokens: int) -> float:
        """Return the seconds that a prompt takes alone."""
        return self._model.prefill_s(0, num_tokens)

    def bound(self, shape: StepShape, num_tokens: int) -> EndedBy:
        """Return the limit that stops a prefill chunk at `num_tokens`, the most that fit."""
        if shape.num_prefill_tokens + num_tokens >= self._most_prefill:
            return "memory"
        is_full = shape.num_tokens + num_tokens >= self._most_tokens
        return "token_budget" if is_full else "time_budget"

    def fits_decode(self, shape: StepShape, limit_s: float) -> bool:
        """Whether the step, its decodes included, ends in time."""
        if shape.num_prefill_tokens and shape.num_tokens > self._most_tokens:
            return False
        if limit_s == UNLIMITED or not self._model.is_known:
            return True
        return self._model.seconds(shape) * self._model.safety_factor(limit_s) <= limit_s

    def drafts_bound(self, shape: StepShape, limit_s: float) -> DraftsEndedBy | None:
        """Return the limit that the step exceeds with its drafts; None if they fit."""
        if self._most_prefill < UNLIMITED:
            return "memory"  # drafts may have caused the shortage
        if limit_s < UNLIMITED:
            # No stream's token may be late because of a draft.
            safety_factor = self._model.safety_factor(limit_s)
            if not self._model.is_known or self._model.seconds(shape) * safety_factor > limit_s:
                return "time_budget"
        return "token_budget" if shape.num_tokens > self._most_tokens else None

    def keeps_pace(self, streams: StepShape, limit_s: float) -> bool:
        """Whether steps of these decodes end in time at the machine's usual speed.

        True for one stream, and for all streams that a tighter limit accepts.

        Args:
            limit_s: seconds between two tokens of a stream.
        """
        if limit_s == UNLIMITED or streams.num_decode_rows == 1 or not self._model.is_known:
            return True
        limit_s = max(0.0, limit_s)
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
        """Whether the step is over budget, which many decodes alone can cause."""
        if limit_s == UNLIMITED:
            return shape.num_tokens > self._most_tokens
        return self._model.is_known and self._model.seconds(shape) > limit_s

    def explain(self, shape: StepShape, limit_s: float) -> str:
        """Describe the promise that a step over budget breaks; empty if it breaks none."""
        if limit_s == UNLIMITED:
            return ""
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
