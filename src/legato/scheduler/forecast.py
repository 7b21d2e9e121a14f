"""When a new request would get its first token, by the step-time model and the queue."""

import math
from collections.abc import Iterator
from itertools import islice

from legato.core.config import SchedulerConfig
from legato.core.request import Request
from legato.scheduler.budget import MIN_CHUNK, StepBudget
from legato.scheduler.fetch_time import FetchTime
from legato.scheduler.foreseen import ForeseenStreams
from legato.scheduler.order import LATE_TURN
from legato.scheduler.queues import Queues
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel

_MOST_PLAYED = 32
"""Waiting requests that are played one by one; of those behind them the same is expected."""

_ALONE = StepShape()

_SPARE = 0.15
"""Share of a step that streams leave for prompts in a forecast. Where they leave none, whether
prompts are computed at all hangs on the slightest change of what is believed of steps."""


class Forecast:
    """Plays the queue forward, many steps at a stroke.

    The work ahead is what goes before the request by rank, one prompt after the other in chunks as
    long as the budget allows. Running streams go on to their `max_tokens`. What comes from another
    engine is fetched when it is the request's turn. Requests that may still come, streams that end
    early, best-effort work and memory that runs out are not foreseen.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        queues: Queues,
        model: StepTimeModel,
        budget: StepBudget,
        fetch_time: FetchTime,
    ) -> None:
        assert config.max_num_batched_tokens is not None
        assert config.max_num_seqs is not None
        self._longest_chunk = config.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs
        self._idle_limit_s = config.idle_limit_s
        self._queues = queues
        self._model = model
        self._budget = budget
        self._fetch_time = fetch_time

    def ttft_s(self, request: Request, now_s: float, up_to_s: float) -> float | None:
        """Seconds until the request's first token; at least `up_to_s` where it is later than that.

        None as long as the model knows nothing. The request does not wait yet.
        """
        if not self._model.is_known:
            return None
        streams = self._streams(now_s)
        for ahead in self._begun_before(request):
            self._serve(ahead, streams, up_to_s)
        begun_s = streams.elapsed_s
        waiting = [*islice(self._queues.waiting_before(request, self._cost_s), _MOST_PLAYED)]
        for ahead in waiting:
            self._await_place(ahead, streams)
            self._serve(ahead, streams, up_to_s)
        if num_left := self._queues.num_waiting_before(request) - len(waiting):
            streams.elapsed_s += (streams.elapsed_s - begun_s) * num_left / len(waiting)
        self._await_place(request, streams)
        self._prefill(request, streams, up_to_s, is_ahead=False)
        ttft_s = streams.elapsed_s + streams.rest_of_step * self._model.seconds(streams.shape)
        if self._queues.has_late(self._queues.tenant(request)):
            ttft_s *= LATE_TURN / (LATE_TURN - 1)
        return ttft_s * self._model.slowness + self._fetch_time.seconds(request)

    def next_end_s(self, now_s: float) -> float | None:
        """Seconds until a running stream is sure to have ended; None where nothing is known."""
        streams = self._streams(now_s)
        if not self._model.is_known or not streams:
            return None
        return streams.num_steps * self._model.seconds(streams.shape)

    def stream_step_s(self, now_s: float, num_tokens: int) -> tuple[float, float] | None:
        """Seconds of a step of the running streams' tokens, and of one more with `num_tokens`.

        Returns:
            that, and what yet another adds to it; None as long as the model knows nothing.
        """
        if not self._model.is_known:
            return None
        shape = self._streams(now_s).shape
        shape.add_decode(num_tokens)
        one_s = self._model.seconds(shape)
        shape.add_decode(num_tokens)
        another_s = self._model.seconds(shape) - one_s
        return one_s * self._model.slowness, another_s * self._model.slowness

    def _streams(self, now_s: float) -> ForeseenStreams:
        streams = ForeseenStreams(self._idle_limit_s)
        for running in self._queues.running.values():
            if running.is_stream and not running.is_best_effort:
                streams.add_running(running, now_s)
        return streams

    def _begun_before(self, request: Request) -> Iterator[Request]:
        """Begun prompts whose prefill goes before the request's."""
        place = self._queues.place(request)
        for running in self._queues.running.values():
            if (
                not running.is_stream
                and not running.is_best_effort
                and self._queues.place(running) <= place
            ):
                yield running

    def _serve(self, ahead: Request, streams: ForeseenStreams, up_to_s: float) -> None:
        if self._prefill(ahead, streams, up_to_s, is_ahead=True):
            streams.add(ahead)

    def _cost_s(self, request: Request) -> float:
        start = request.num_tokens - request.num_missing_tokens
        return self._model.chunk_s(_ALONE, start, request.num_missing_tokens)

    def _await_place(self, request: Request, streams: ForeseenStreams) -> None:
        """Until enough streams have ended for one more to run, and be paced, beside them."""
        while streams and not (
            len(streams) < self._max_num_seqs and self._can_join(request, streams)
        ):
            streams.advance(streams.num_steps, self._model.seconds(streams.shape))

    def _can_join(self, request: Request, streams: ForeseenStreams) -> bool:
        limit_s = min(streams.steady_limit_s, request.step_s)
        limit_s *= (1.0 - _SPARE) / self._model.slowness
        streams.shape.add_decode(request.num_tokens)
        can_join = self._budget.paces(streams.shape, limit_s)
        streams.shape.remove_decode(request.num_tokens)
        return can_join

    def _prefill(
        self, request: Request, streams: ForeseenStreams, until_s: float, *, is_ahead: bool
    ) -> bool:
        """Compute what is left of its prompt; False where that comes to no end in time."""
        start = request.num_tokens - request.num_missing_tokens
        end = request.num_tokens
        while start < end and streams.elapsed_s < until_s:
            limit_s, num_steps = streams.limit_s, streams.num_steps
            chunk = self._chunk((start + end) // 2, streams, limit_s)
            if chunk:
                num_steps = min(num_steps, (end - start) / chunk)
            elif start and is_ahead:
                return False  # begun, but no chunk fits beside the streams: it is passed over
            if limit_s > streams.steady_limit_s:
                num_steps = min(1.0, num_steps)  # slack is spent once
            step_s = self._step_s(streams, start, end, chunk)
            start += math.ceil(num_steps * chunk)
            streams.advance(num_steps, step_s)
            if start >= end and streams.rest_of_step * chunk <= MIN_CHUNK:
                # Too little is left of the step for another prompt.
                streams.advance(streams.rest_of_step, step_s)
        return start >= end

    def _chunk(self, start: int, streams: ForeseenStreams, limit_s: float) -> int:
        chunk = self._budget.max_chunk(streams.shape, start, self._longest_chunk, limit_s)
        return chunk if chunk or streams else MIN_CHUNK

    def _step_s(self, streams: ForeseenStreams, start: int, end: int, chunk: int) -> float:
        """How long a step is that is filled with such chunks of tokens [start, end)."""
        step_s = self._model.seconds(streams.shape)
        if chunk:
            own = min(chunk, end - start)  # the rest of the step is others' of its kind
            mean_start = (start + end - own) // 2
            step_s += chunk / own * self._model.chunk_s(streams.shape, mean_start, own)
        return step_s
