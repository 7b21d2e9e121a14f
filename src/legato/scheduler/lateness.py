"""Whether a request that waits can still have its first token in time."""

import math

from legato.core.request import Request
from legato.scheduler.budget import UNLIMITED
from legato.scheduler.order import LATE_TURN
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel

_LEAST_ROOM = 0.1
"""Share of a step that prompts are taken to have at least, where streams leave less just now."""


class Lateness:
    """Takes a prompt for lost as soon as computing it beside the present streams takes too long.

    Waiting for the deadline itself would have those computed first that just miss it. A prompt
    that has begun is not looked at any more: giving it up would waste what it has had.

    Args:
        longest_chunk: that a step may hold.
        idle_limit_s: how long a step may take that no token waits for.
    """

    def __init__(self, model: StepTimeModel, longest_chunk: int, idle_limit_s: float) -> None:
        self._model = model
        self._longest_chunk = longest_chunk
        self._idle_limit_s = idle_limit_s
        self._now_s = 0.0
        self._streams = StepShape()
        self._limit_s = idle_limit_s
        self._beside_s: tuple[float, float] | None = None

    def begin_step(self, now_s: float, *, is_idle: bool) -> None:
        """The time to compare with from here on; without streams where the engine was idle."""
        self._now_s = now_s
        self._beside_s = None
        if is_idle:
            self._streams, self._limit_s = StepShape(), self._idle_limit_s

    def end_step(self, shape: StepShape, limit_s: float) -> None:
        """What the next prompts will be computed beside, as far as is known: the same as these."""
        self._streams = StepShape()
        self._streams.num_decode_rows = self._streams.num_samples = shape.num_decode_rows
        self._streams.decode_context = shape.decode_context
        self._limit_s = limit_s
        self._beside_s = None

    def is_lost(self, request: Request) -> bool:
        deadline_s = request.ttft_deadline_s
        if deadline_s is None or request.first_token_s is not None:
            return False
        left_s = deadline_s - self._now_s
        return left_s < 0.0 or (self._model.is_known and left_s < self._prefill_s(request))

    def _prefill_s(self, request: Request) -> float:
        """How long a prompt takes if nothing else is computed beside the streams."""
        num_tokens = request.num_missing_tokens
        start = request.num_tokens - num_tokens
        prompt_s = self._model.chunk_s(self._streams, start, num_tokens)
        streams_s, room_s = self._streams_and_room_s()
        num_steps = math.ceil(num_tokens / self._longest_chunk)
        num_steps = max(num_steps, math.ceil(prompt_s / room_s))
        step_s = prompt_s / num_steps + streams_s
        # One more may be under way, and some begin with prompts that are late.
        num_steps += 1 + num_steps // (LATE_TURN - 1)
        return num_steps * step_s * self._model.slowness

    def _streams_and_room_s(self) -> tuple[float, float]:
        """What the streams take of a step, and what they leave; the same throughout a step."""
        if self._beside_s is None:
            streams_s = self._model.seconds(self._streams)
            room_s = UNLIMITED
            if self._limit_s < UNLIMITED:
                room_s = self._limit_s / self._model.caution - streams_s
                room_s = max(room_s, _LEAST_ROOM * self._limit_s)
            self._beside_s = streams_s, room_s
        return self._beside_s
