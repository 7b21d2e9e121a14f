"""The running streams as a forecast sees them: a token a step, ending one after the other."""

import heapq
import itertools
import math
from collections import Counter
from typing import NamedTuple

from legato.core.request import Request
from legato.core.slo import SloClass
from legato.scheduler.budget import UNLIMITED
from legato.scheduler.step_shape import StepShape

_ROUNDING = 1e-6


class _Stream(NamedTuple):
    """All times in seconds from the forecast's beginning on.

    Attributes:
        last_step: with which it ends.
        context: keys that its row would read in step 0; each step adds one.
        tie: tells streams apart that end together.
        pace_s: when its token of step 0 is due by its pace, which may be before the forecast.
    """

    last_step: float
    tie: int
    context: float
    slo: SloClass
    pace_s: float


class ForeseenStreams:
    """Steps are counted in fractions, since prompts share them.

    Args:
        idle_limit_s: how long a step may take that no token waits for.

    Attributes:
        elapsed_s: from the forecast's beginning on.
        shape: of a step of their tokens alone.
    """

    def __init__(self, idle_limit_s: float) -> None:
        self._idle_limit_s = idle_limit_s
        self._by_end: list[_Stream] = []  # a heap
        self._num_of_class: Counter[SloClass] = Counter()
        self._joining: list[Request] = []
        self._ties = itertools.count()
        self._num_done = 0.0
        self.elapsed_s = 0.0
        self.shape = StepShape()

    def __len__(self) -> int:
        return len(self._by_end) + len(self._joining)

    def add_running(self, request: Request, now_s: float) -> None:
        """Add a stream that runs where the forecast begins."""
        tpot_s = request.slo.tpot_s or UNLIMITED
        begun_s = request.first_expected_s - now_s
        num_output_tokens = request.num_expected_output_tokens
        self._add(request, _num_left(request), begun_s + num_output_tokens * tpot_s)

    def add(self, request: Request) -> None:
        """Let a request run once the step has ended that brings its first token."""
        if _num_left(request) > 1:
            self._joining.append(request)

    def _add(self, request: Request, num_left: int, pace_s: float) -> None:
        heapq.heappush(
            self._by_end,
            _Stream(
                self._num_done + num_left,
                next(self._ties),
                request.num_expected_tokens - self._num_done,
                request.slo,
                pace_s,
            ),
        )
        self._num_of_class[request.slo] += 1
        self.shape.add_decode(request.num_expected_tokens)

    @property
    def steady_limit_s(self) -> float:
        """How long each of many steps may take."""
        return min((slo.step_s or UNLIMITED for slo in +self._num_of_class), default=UNLIMITED)

    @property
    def limit_s(self) -> float:
        """How long the next step may take; longer than the steady limit if all are ahead."""
        steady_s = self.steady_limit_s
        if steady_s == UNLIMITED:
            return self._idle_limit_s
        if all(slo.tpot_s is None for slo in +self._num_of_class):
            return steady_s
        return min(map(self._due_in_s, self._by_end))

    @property
    def num_steps(self) -> float:
        """Until the next one ends or joins."""
        if self._joining:
            return self.rest_of_step
        return self._by_end[0].last_step - self._num_done if self._by_end else math.inf

    @property
    def rest_of_step(self) -> float:
        """The share of the last step that is still to come."""
        return math.ceil(self._num_done - _ROUNDING) - self._num_done

    def advance(self, num_steps: float, step_s: float) -> None:
        self._num_done += num_steps
        self.elapsed_s += num_steps * step_s
        self.shape.decode_context += num_steps * self.shape.num_decode_rows
        if self.rest_of_step <= _ROUNDING:
            self._join()
        while self._by_end and self._by_end[0].last_step <= self._num_done + _ROUNDING:
            ended = heapq.heappop(self._by_end)
            self.shape.remove_decode(ended.context + self._num_done)
            self._num_of_class[ended.slo] -= 1

    def _join(self) -> None:
        for request in self._joining:
            tpot_s = request.slo.tpot_s or UNLIMITED
            pace_s = self.elapsed_s + (1.0 - self._num_done) * tpot_s
            self._add(request, _num_left(request) - 1, pace_s)
        self._joining.clear()

    def _due_in_s(self, stream: _Stream) -> float:
        itl_s, tpot_s = stream.slo.itl_s or UNLIMITED, stream.slo.tpot_s
        if tpot_s is None:
            return itl_s
        pace_s = stream.pace_s + self._num_done * tpot_s - self.elapsed_s
        return min(itl_s, max(tpot_s, pace_s))


def _num_left(request: Request) -> int:
    return (request.params.max_tokens or 0) - request.num_expected_output_tokens
