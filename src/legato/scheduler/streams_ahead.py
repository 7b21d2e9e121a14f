"""Running streams in a forecast: each gets a token a step until it ends."""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from legato.core.request import Request
from legato.core.slo import SloClass
from legato.scheduler.budget import UNLIMITED
from legato.scheduler.expected_ends import OutputLengths, longest_steps
from legato.scheduler.step_shape import StepShape

_ROUNDING = 1e-6
_ENDING_TOGETHER = 8
"""A forecast advances until one in this many streams has ended. Beside hundreds of streams, it
would be slow to advance from one end to the next."""


class _Pace:
    """The streams of one class of service, and how far the slowest is ahead of its pace.

    Attributes:
        count: number of streams.
        is_bounded: whether the class promises any bound on a step.
    """

    __slots__ = ("_dues", "_itl_s", "_tpot_s", "count", "is_bounded")

    def __init__(self, slo: SloClass) -> None:
        self.count = 0
        self._tpot_s = slo.tpot_s or UNLIMITED
        self._itl_s = slo.itl_s or UNLIMITED
        self.is_bounded = slo.promise_s is not None
        # Heap of (time that the token of step 0 is due by the pace, the stream's last step). The
        # time may be before the forecast. Streams that have ended leave at the top.
        self._dues: list[tuple[float, float]] = []

    def copy(self) -> "_Pace":
        other = _Pace.__new__(_Pace)
        other.count, other.is_bounded = self.count, self.is_bounded
        other._itl_s, other._tpot_s = self._itl_s, self._tpot_s
        other._dues = self._dues.copy()
        return other

    def add(self, due_s: float, last_step: float) -> None:
        self.count += 1
        if self._tpot_s < UNLIMITED:
            heapq.heappush(self._dues, (due_s, last_step))

    def steady_limit_s(self, safety_factor: float = 1.0) -> float:
        """Return the limit that many steps settle at if each takes `limit / safety_factor`.

        A step shorter than the pace puts its streams ahead, which raises the next limit.
        """
        return min(self._itl_s, self._tpot_s * safety_factor)

    def limit_s(self, num_done: float, elapsed_s: float) -> float:
        """Return the limit of the next step after `num_done` steps."""
        if self._tpot_s == UNLIMITED:
            return self._itl_s
        while self._dues[0][1] <= num_done + _ROUNDING:
            heapq.heappop(self._dues)
        ahead_s = self._dues[0][0] + num_done * self._tpot_s - elapsed_s
        return min(self._itl_s, max(self._tpot_s, ahead_s))


class StreamsAhead:
    """The running streams; steps are counted in fractions, since prompts share them.

    Args:
        idle_limit_s: limit of a step in which no token is due.
        lengths: of the outputs.
        running: streams at the forecast's beginning.

    Attributes:
        elapsed_s: seconds since the forecast's beginning.
        shape: shape of a step of the streams' tokens alone.
    """

    def __init__(
        self,
        idle_limit_s: float,
        lengths: OutputLengths,
        running: Iterable[Request] = (),
        now_s: float = 0.0,
    ) -> None:
        self._idle_limit_s = idle_limit_s
        self._lengths = lengths
        self._num_left = lengths.steady_left
        self._paces: dict[SloClass, _Pace] = {}
        self._joining: list[tuple[Request, int]] = []  # each with its tokens until its end
        self._num_done = 0.0
        self.elapsed_s = 0.0
        self.shape = StepShape()
        # Of each stream, by its end: the step that ends it, counted from the forecast's beginning;
        # the keys that its row would read in step 0, each step adding one; and its class.
        self._last_steps: list[float] = []
        self._contexts: list[float] = []
        self._slos: list[SloClass] = []
        running = [request for request in running if not request.ends_in_flight]
        for request, num_left in zip(
            running, lengths.expected(running)[:, 1].tolist(), strict=True
        ):
            tpot_s = request.slo.tpot_s or 0.0
            begun_s = request.first_expected_s - now_s
            due_s = begun_s + request.num_expected_output_tokens * tpot_s
            in_flight = request.num_expected_tokens - request.num_tokens
            self._begin(request, max(1, num_left - in_flight), due_s)

    def copy(self) -> "StreamsAhead":
        """Return an independent copy."""
        other = StreamsAhead(self._idle_limit_s, self._lengths)
        other._paces = {slo: pace.copy() for slo, pace in self._paces.items()}
        other._last_steps, other._contexts = self._last_steps.copy(), self._contexts.copy()
        other._slos = self._slos.copy()
        other._joining = self._joining.copy()
        other._num_done, other.elapsed_s = self._num_done, self.elapsed_s
        other.shape = self.shape.copy()
        return other

    def __len__(self) -> int:
        return len(self._last_steps) + len(self._joining)

    def add(self, requests: Iterable[Request]) -> None:
        """Add requests as streams once the current step has sampled their first tokens."""
        lefts = [(request, self._num_left(request)) for request in requests]
        self._joining += [(request, num_left) for request, num_left in lefts if num_left > 1]
        if self.rest_of_step <= _ROUNDING:
            self._join()

    def shape_with(self, requests: Iterable[Request]) -> StepShape:
        """Return the next step's shape with the tokens of the requests."""
        shape = self.shape.copy()
        shape.add_decodes([request.num_tokens for request, _ in self._joining])
        shape.add_decodes([request.num_tokens for request in requests])
        return shape

    def longest_steps(self, requests: Sequence[Request]) -> list[StepShape]:
        """Return steps of streams and requests: until the first end, and with most keys."""
        joining = [*self._joining, *((request, self._num_left(request)) for request in requests)]
        contexts = np.array(self._contexts) + self._num_done
        contexts = np.concatenate((contexts, [request.num_tokens for request, _ in joining]))
        left = np.array(self._last_steps) - self._num_done
        left = np.concatenate((left, [num_left for _, num_left in joining]))
        return longest_steps(contexts, left, 2)

    @property
    def steady_limit_s(self) -> float:
        """Limit of each of many steps."""
        return self._steady_s(1.0)

    def settled_limit_s(self, safety_factor: float) -> float:
        """Return the limit that steps settle at if each takes `limit / safety_factor`."""
        settled_s = self._steady_s(safety_factor)
        return self._idle_limit_s if settled_s == UNLIMITED else settled_s

    @property
    def limit_s(self) -> float:
        """Limit of the next step; above the steady limit if all streams are ahead."""
        return min(
            (
                pace.limit_s(self._num_done, self.elapsed_s)
                for pace in self._paces.values()
                if pace.count and pace.is_bounded
            ),
            default=self._idle_limit_s,
        )

    def _steady_s(self, safety_factor: float) -> float:
        return min(
            (pace.steady_limit_s(safety_factor) for pace in self._paces.values() if pace.count),
            default=UNLIMITED,
        )

    @property
    def next_end(self) -> float:
        """Steps until the next stream ends."""
        return self.until_end_of(1)

    @property
    def num_steps(self) -> float:
        """Steps until a stream joins, or a few end."""
        return self.until_end_of(max(1, len(self._last_steps) // _ENDING_TOGETHER))

    def until_end_of(self, count: int) -> float:
        """Return the steps until a stream joins, or `count` have ended."""
        if self._joining:
            return self.rest_of_step
        if not self._last_steps:
            return math.inf
        return self._last_steps[min(count, len(self._last_steps)) - 1] - self._num_done

    @property
    def rest_of_step(self) -> float:
        """Share of the current step that is still to come."""
        return math.ceil(self._num_done - _ROUNDING) - self._num_done

    def advance(self, num_steps: float, step_s: float) -> None:
        self._num_done += num_steps
        self.elapsed_s += num_steps * step_s
        self.shape.decode_context += num_steps * self.shape.num_decode_rows
        if self.rest_of_step <= _ROUNDING:
            self._join()
        ended = slice(bisect_right(self._last_steps, self._num_done + _ROUNDING))
        for context, slo in zip(self._contexts[ended], self._slos[ended], strict=True):
            self.shape.remove_decode(context + self._num_done)
            self._paces[slo].count -= 1
        del self._last_steps[ended], self._contexts[ended], self._slos[ended]

    def _join(self) -> None:
        for request, num_left in self._joining:
            due_s = self.elapsed_s + (1.0 - self._num_done) * (request.slo.tpot_s or 0.0)
            self._begin(request, num_left - 1, due_s)
        self._joining.clear()

    def _begin(self, request: Request, num_left: int, due_s: float) -> None:
        """Args: due_s: when its token of step 0 is due by its pace."""
        pace = self._paces.get(request.slo)
        if pace is None:
            pace = self._paces[request.slo] = _Pace(request.slo)
        last_step = self._num_done + num_left
        pace.add(due_s, last_step)
        num_tokens = request.num_expected_tokens
        self.shape.add_decode(num_tokens)
        place = bisect_right(self._last_steps, last_step)
        self._last_steps.insert(place, last_step)
        self._contexts.insert(place, num_tokens - self._num_done)
        self._slos.insert(place, request.slo)
