"""How much work one step may hold."""

import math
from typing import Protocol

from legato.core.step_record import DraftsEndedBy, EndedBy
from legato.scheduler.step_costs import ROW_BOUNDS
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel

_SMALL_CHUNK = 32
"""Prefill tokens of a step as long as nothing is known of their cost, or where the promise is lost
anyway, because the decodes alone take too long."""

MIN_CHUNK = ROW_BOUNDS[0]
"""Tokens below which a chunk costs hardly less than one of this length."""

_NEGLIGIBLE = 0.1
"""Share by which streams may lengthen the step of one of them whatever is promised: a promise that
leaves no more room than that is lost to the machine's noise anyway."""

UNLIMITED = math.inf


class StepBudget(Protocol):
    """Decides what still fits into a step, from what is in it and how long it may take.

    `limit_s` is the time until the first token of a running stream is due, `UNLIMITED` where
    nothing is promised to those that run.
    """

    def max_chunk(self, shape: StepShape, start: int, wanted: int, limit_s: float) -> int:
        """Most prefill tokens, up to `wanted`, that a chunk at position `start` may bring."""
        ...

    def bound(self, shape: StepShape, num_tokens: int) -> EndedBy:
        """What keeps a prefill chunk of `num_tokens`, all that fit, from being longer."""
        ...

    def fits_decode(self, shape: StepShape, limit_s: float) -> bool:
        """Whether the step, the decodes in `shape` among it, ends in time."""
        ...

    def drafts_bound(self, shape: StepShape, limit_s: float) -> DraftsEndedBy | None:
        """What keeps the step, the drafts in `shape` among it, from running; None for nothing."""
        ...

    def paces(self, streams: StepShape, limit_s: float) -> bool:
        """Whether steps of such decodes end in time on the machine as it usually is.

        It is true of one stream, and of all streams that a tighter limit lets run.

        Args:
            limit_s: between two tokens of a stream.
        """
        ...

    def is_exceeded(self, shape: StepShape, limit_s: float) -> bool:
        """Whether the step is over budget, as one with many decodes can be."""
        ...

    def explain(self, shape: StepShape, limit_s: float) -> str:
        """Which promise a step that is over budget breaks; empty where it breaks none."""
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
        # Decodes alone may exceed the budget; prefill is then nothing, never negative.
        return max(0, min(wanted, self.max_num_batched_tokens - shape.num_tokens))

    def bound(self, shape: StepShape, num_tokens: int) -> EndedBy:  # noqa: ARG002
        return "token_budget"

    def fits_decode(self, shape: StepShape, limit_s: float) -> bool:  # noqa: ARG002
        return True

    def drafts_bound(self, shape: StepShape, limit_s: float) -> DraftsEndedBy | None:
        return "token_budget" if self.is_exceeded(shape, limit_s) else None

    def paces(self, streams: StepShape, limit_s: float) -> bool:  # noqa: ARG002
        return True

    def is_exceeded(self, shape: StepShape, limit_s: float) -> bool:  # noqa: ARG002
        return shape.num_tokens > self.max_num_batched_tokens

    def explain(self, shape: StepShape, limit_s: float) -> str:  # noqa: ARG002
        return ""


class TimeBudget:
    """As many tokens as are predicted to be computed in time.

    The step-time model is inverted for the longest chunk whose step, with the model's own margin
    on top, ends before a running stream's next token is due. Where nothing is due, as when no
    stream is running, only `max_num_batched_tokens` bounds the step.
    """

    def __init__(self, model: StepTimeModel, max_num_batched_tokens: int) -> None:
        self._model = model
        self._tokens = TokenBudget(max_num_batched_tokens)

    def max_chunk(self, shape: StepShape, start: int, wanted: int, limit_s: float) -> int:
        cap = self._tokens.max_chunk(shape, start, wanted, limit_s)
        if limit_s == UNLIMITED or not cap:
            return cap
        if not self._model.is_known or self._is_lost(shape, limit_s):
            return max(0, min(cap, _SMALL_CHUNK - shape.num_prefill_tokens))
        chunk = self._model.longest_chunk(shape, start, limit_s, cap)
        # A second prompt's crumb costs the step more than it brings; a first one is all that the
        # promise leaves.
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
        return self._model.seconds(shape) * self._model.caution <= limit_s

    def drafts_bound(self, shape: StepShape, limit_s: float) -> DraftsEndedBy | None:
        if limit_s < UNLIMITED:
            # Nobody's token may be late for what is no more than a guess.
            caution = self._model.caution
            if not self._model.is_known or self._model.seconds(shape) * caution > limit_s:
                return "time_budget"
        return self._tokens.drafts_bound(shape, limit_s)

    def paces(self, streams: StepShape, limit_s: float) -> bool:
        if limit_s == UNLIMITED or streams.num_decode_rows == 1 or not self._model.is_known:
            return True
        alone = StepShape()
        alone.add_decode(streams.decode_context / streams.num_decode_rows)
        alone_s = self._model.seconds(alone)
        return self._model.seconds(streams) <= max(
            limit_s / (1.0 + self._model.margin),
            # Where one stream has no room for the margin twice: the margin is half of its room.
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
        """Whether the decodes alone leave no margin, as where the machine has become slower."""
        decodes = StepShape()
        decodes.num_decode_rows = decodes.num_samples = shape.num_decode_rows
        decodes.decode_context = shape.decode_context
        return not self.fits_decode(decodes, limit_s)
