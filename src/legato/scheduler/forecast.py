"""When a new request would get its first token, by the step-time model and the queue."""

import math
from collections.abc import Iterable, Iterator

from legato.core.request import Request
from legato.scheduler.budget import UNLIMITED, StepBudget
from legato.scheduler.queues import Queues
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel


class Forecast:
    """Plays the queue forward, many steps at a stroke.

    The work ahead is what goes before the request by rank, one prompt after the other in chunks as
    long as the budget allows. Running streams go on to their `max_tokens`. Requests that may still
    come, and streams that end early, are not foreseen: a busy server is later than this and an idle
    one earlier.

    Args:
        max_num_batched_tokens: cap of a chunk.
    """

    def __init__(
        self,
        queues: Queues,
        model: StepTimeModel,
        budget: StepBudget,
        max_num_batched_tokens: int,
    ) -> None:
        self._queues = queues
        self._model = model
        self._budget = budget
        self._max_num_batched_tokens = max_num_batched_tokens

    def ttft_s(self, request: Request, up_to_s: float) -> float | None:
        """Seconds until the request's first token; at least `up_to_s` where it is later than that.

        None as long as the model knows nothing. The request does not wait yet.
        """
        if not self._model.is_known:
            return None
        streams = self._streams()
        elapsed_s = self._model.seconds(streams.shape)  # the last step is never a fraction of one
        begun = {ahead.request_id: ahead for ahead in self._begun()}
        for ahead in (*begun.values(), *self._queues.waiting_before(request), request):
            if ahead.request_id not in begun:
                elapsed_s += self._admission_s(ahead, streams)
            elapsed_s += self._prefill_s(ahead, streams, up_to_s - elapsed_s)
            streams.add(ahead)
            if elapsed_s >= up_to_s:
                break
        return elapsed_s

    def next_end_s(self) -> float | None:
        """Seconds until a running stream is sure to have ended; None where nothing is known."""
        streams = self._streams()
        if not self._model.is_known or streams.num_steps == math.inf:
            return None
        return streams.num_steps * self._model.seconds(streams.shape)

    def _admission_s(self, request: Request, streams: "_Streams") -> float:
        """Until enough streams have ended for one more to be paced beside them."""
        elapsed_s = 0.0
        while streams.num_steps != math.inf and not self._can_join(request, streams):
            elapsed_s += streams.num_steps * self._model.seconds(streams.shape)
            streams.advance(streams.num_steps)
        return elapsed_s

    def _can_join(self, request: Request, streams: "_Streams") -> bool:
        limit_s = min(streams.limit_s, request.slo.step_s or UNLIMITED)
        streams.shape.add_decode(request.num_tokens)
        fits = self._budget.fits_decode(streams.shape, limit_s)
        streams.shape.remove_decode(request.num_tokens)
        return fits

    def _begun(self) -> Iterator[Request]:
        for running in self._queues.running.values():
            if running.num_remaining_tokens > 1 and not running.is_best_effort:
                yield running

    def _streams(self) -> "_Streams":
        return _Streams(
            r
            for r in self._queues.running.values()
            if r.num_remaining_tokens == 1 and not r.is_best_effort
        )

    def _prefill_s(self, request: Request, streams: "_Streams", up_to_s: float) -> float:
        """How long the request's prefill takes, one running stream after the other ending.

        Steps are counted in fractions, since prompts share them.
        """
        start, end, elapsed_s = request.num_computed_tokens, request.num_tokens, 0.0
        while start < end and elapsed_s < up_to_s:
            middle = (start + end) // 2
            chunk = self._budget.max_chunk(
                streams.shape, middle, self._max_num_batched_tokens, streams.limit_s
            )
            num_steps, step_s = streams.num_steps, self._model.seconds(streams.shape)
            if chunk:
                num_steps = min(num_steps, (end - start) / chunk)
                step_s += self._model.chunk_s(streams.shape, middle, chunk)
            start += round(num_steps * chunk)
            elapsed_s += num_steps * step_s
            streams.advance(num_steps)
        return elapsed_s


_ROUNDING = 1e-6


class _Streams:
    """Running streams, as they end one after the other."""

    def __init__(self, requests: Iterable[Request]) -> None:
        # (steps left, context, longest step), the first to end last.
        self._left: list[tuple[float, int, float]] = sorted(
            (
                (
                    (r.params.max_tokens or 0) - r.num_output_tokens,
                    r.num_tokens,
                    r.slo.step_s or UNLIMITED,
                )
                for r in requests
            ),
            reverse=True,
        )
        self._num_done = 0.0
        self.shape = StepShape()
        for _, context, _ in self._left:
            self.shape.add_decode(context)

    def add(self, request: Request) -> None:
        """Let one more run, from its first token on."""
        num_left = (request.params.max_tokens or 0) - request.num_output_tokens
        step_s = request.slo.step_s or UNLIMITED
        self._left.append((self._num_done + num_left, request.num_tokens, step_s))
        self._left.sort(reverse=True)
        self.shape.add_decode(request.num_tokens)

    @property
    def limit_s(self) -> float:
        return min((limit_s for _, _, limit_s in self._left), default=UNLIMITED)

    @property
    def num_steps(self) -> float:
        """Until the next one ends."""
        return self._left[-1][0] - self._num_done if self._left else math.inf

    def advance(self, num_steps: float) -> None:
        self._num_done += num_steps
        while self._left and self._left[-1][0] <= self._num_done + _ROUNDING:
            _, context, _ = self._left.pop()
            self.shape.remove_decode(context)
