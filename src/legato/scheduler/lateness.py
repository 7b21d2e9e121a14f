"""Finds waiting requests that can no longer get their first token in time."""

import math
from collections.abc import Iterable

from legato.core.request import Request
from legato.scheduler.budget import UNLIMITED
from legato.scheduler.order import LATE_TURN
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel

_KEPT_SLACK = 0.1
"""Share of a TTFT promise kept in reserve. In a simulated overload of 20 tenants, 8 % of the first
tokens were late without it, and 0.2 % with it."""

_LEAST_ROOM = 0.1
"""Least share of a step assumed for prompts, even if streams leave less at present."""


class Lateness:
    """Counts a prompt as lost once it would end too late beside the present streams.

    To wait for the deadline itself would compute prompts first that just miss it. A prompt that has
    begun is not checked again: giving it up would waste the work on it.

    Args:
        longest_chunk: most tokens of a step.
        idle_limit_s: limit of a step in which no token is due.
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
        """Set the present time; forget the streams if the engine was idle."""
        self._now_s = now_s
        self._beside_s = None
        if is_idle:
            self._streams, self._limit_s = StepShape(), self._idle_limit_s

    def end_step(self, shape: StepShape, limit_s: float) -> None:
        """Record a step's streams: the next prompts are expected to run beside the same ones."""
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

    def slack_s(self, prompts: Iterable[Request], margin: float) -> float:
        """Return the least slack among prompts that are computed one after the other.

        While there is slack, other prompts may go before them (slack stealing: Lehoczky and
        Ramos-Thuel, 1992).

        Args:
            prompts: in the order of their computation; each has a TTFT deadline.
            margin: share by which to lengthen forecasts.
        """
        if not self._model.is_known:
            return math.inf
        streams_s, room_s = self._streams_and_room_s()
        slack_s, work_s = math.inf, 0.0
        stretch = self._model.slowdown * (1.0 + margin)
        for request in prompts:
            num_tokens = request.num_missing_tokens
            start = request.num_tokens - num_tokens
            work_s += self._model.chunk_s(self._streams, start, num_tokens)
            ends_s = work_s + (work_s / room_s + 1.0) * streams_s
            assert request.slo.ttft_s is not None
            by_s = request.message.arrival_time_s + (1.0 - _KEPT_SLACK) * request.slo.ttft_s
            slack_s = min(slack_s, by_s - self._now_s - ends_s * stretch)
        return slack_s

    def _prefill_s(self, request: Request) -> float:
        """Return the seconds that a prompt takes as the only prompt beside the streams."""
        num_tokens = request.num_missing_tokens
        start = request.num_tokens - num_tokens
        prompt_s = self._model.chunk_s(self._streams, start, num_tokens)
        streams_s, room_s = self._streams_and_room_s()
        num_steps = math.ceil(num_tokens / self._longest_chunk)
        num_steps = max(num_steps, math.ceil(prompt_s / room_s))
        step_s = prompt_s / num_steps + streams_s
        # One more step may be under way, and some steps begin with late prompts.
        num_steps += 1 + num_steps // (LATE_TURN - 1)
        return num_steps * step_s * self._model.slowdown

    def _streams_and_room_s(self) -> tuple[float, float]:
        """Return the seconds of a step that streams take and leave; cached for one step."""
        if self._beside_s is None:
            streams_s = self._model.seconds(self._streams)
            room_s = UNLIMITED
            if self._limit_s < UNLIMITED:
                safety_factor = self._model.prefill_safety_factor(self._streams, self._limit_s)
                room_s = self._limit_s / safety_factor - streams_s
                room_s = max(room_s, _LEAST_ROOM * self._limit_s)
            self._beside_s = streams_s, room_s
        return self._beside_s
