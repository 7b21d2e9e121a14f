"""Forecasts a new request's first token from the step-time model and the queue."""

import math
from collections.abc import Collection, Iterable, Sequence

from legato.core.config import SchedulerConfig
from legato.core.request import AddRequest, Request
from legato.core.sampling_params import SamplingParams
from legato.core.slo import MAX_PRIORITY, ServiceParams, SloClass
from legato.core.token_ids import token_array
from legato.kv.holds import Holds
from legato.scheduler.budget import MIN_CHUNK, UNLIMITED, StepBudget
from legato.scheduler.expected_ends import OutputLengths
from legato.scheduler.order import LATE_SHARE
from legato.scheduler.queues import Queues
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from legato.scheduler.streams_ahead import StreamsAhead
from legato.scheduler.tenants import KEPT_PACE, KEPT_PLACES, NEWCOMER, places_left

_ALONE, _TOGETHER, _MOST_PLAYED = 8, 4, 40
"""Waiting requests played one by one; size of the groups that later ones are played in; and the
most that are played at all. The time of the rest is extrapolated."""

_SPARE = 0.15
"""Share of a step that streams leave for prompts in a forecast. If they left none, the slightest
change of the step-time model would decide whether prompts are computed at all."""

_KEPT = 0.9
"""Weight that earlier fetches keep after a new one."""

_KEPT_SLACK = 0.1
"""Share of a TTFT promise kept in reserve. In a simulated overload of 20 tenants, 8 % of the first
tokens were late without it, and 0.2 % with it."""

_LEAST_ROOM, _LEAST_S = 0.1, 1e-4
"""Least share of a step, and least seconds, assumed for prompts, even if streams leave less at
present: the rest of a limit may be short because a step was interrupted."""

_LONG = 4096
"""Tokens of the prompt that measures the time per token; at most half of the context."""
_HORIZON_S = 60.0

_Ahead = tuple[list[Request], list[Request], float]


class FetchTime:
    """Forecasts how long the link between engines delays a request.

    The time until the other engine has computed the blocks is not included: that engine forecasts
    it.

    Attributes:
        token_s: seconds to fetch a token's keys and values; 0 until blocks have arrived.
    """

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self._num_tokens = self._seconds = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record that `num_tokens` arrived while the link was busy for `seconds`."""
        self._num_tokens = _KEPT * self._num_tokens + num_tokens
        self._seconds = _KEPT * self._seconds + seconds

    @property
    def token_s(self) -> float:
        return self._seconds / self._num_tokens if self._num_tokens else 0.0

    def seconds(self, request: Request) -> float:
        """Return the seconds until a waiting request's blocks arrive, after those in transit."""
        if not request.is_to_be_fetched or not self._num_tokens:
            return 0.0
        return self._holds.num_to_come(request) * self.token_s


class Forecast:
    """Plays the queue forward, many steps at a time.

    The prompts that rank before the request are computed one after the other, in chunks as long as
    the budget allows. Running streams go on to their expected ends. Blocks from another engine are
    fetched when it is the request's turn. Future requests, streams that end early, best-effort work
    and a lack of memory are not foreseen.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        queues: Queues,
        model: StepTimeModel,
        budget: StepBudget,
        fetch_time: FetchTime,
        lengths: OutputLengths,
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
        self._lengths = lengths

    def ttft_s(
        self, request: Request, now_s: float, up_to_s: float, without: Collection[Request] = ()
    ) -> float | None:
        """Return the seconds until the first token of a request that is not queued yet.

        The result is `up_to_s` or more if the token comes later than that, and None until the
        step-time model is known.

        Args:
            without: waiting requests to leave out.
        """
        if not self._model.is_known:
            return None
        streams = self._streams(now_s)
        self._play(self._ahead(request, without), streams, up_to_s)
        return self._ttft_s(request, streams, now_s, up_to_s)

    def two_ttfts_s(
        self, shorter: Request, longer: Request, now_s: float, up_to_s: float
    ) -> tuple[float, float] | None:
        """Return `ttft_s` of two requests; the same requests ahead of both are played once."""
        if not self._model.is_known:
            return None
        before_shorter = self._streams(now_s)
        before_longer = before_shorter.copy()
        ahead, ahead_of_longer = self._ahead(shorter), self._ahead(longer)
        self._play(ahead, before_shorter, up_to_s)
        if ahead == ahead_of_longer:
            before_longer = before_shorter.copy()
        else:
            self._play(ahead_of_longer, before_longer, up_to_s)
        return (
            self._ttft_s(shorter, before_shorter, now_s, up_to_s),
            self._ttft_s(longer, before_longer, now_s, up_to_s),
        )

    def next_end_s(self, now_s: float) -> float | None:
        """Return the seconds until a running stream must have ended; None if unknown."""
        streams = self._streams(now_s)
        if not self._model.is_known or not streams:
            return None
        return streams.next_end * self._model.seconds(streams.shape)

    def stream_step_s(self, num_tokens: int) -> tuple[float, float] | None:
        """Predict a step of the running streams and one more stream of `num_tokens`.

        Returns:
            the step's seconds, and the seconds that yet another such stream adds; None until the
            step-time model is known.
        """
        if not self._model.is_known:
            return None
        shape = StepShape()
        shape.add_decodes([*(r.num_expected_tokens for r in self._running_streams()), num_tokens])
        one_s = self._model.seconds(shape)
        shape.add_decode(num_tokens)
        another_s = self._model.seconds(shape) - one_s
        return one_s * self._model.slowdown, another_s * self._model.slowdown

    def _streams(self, now_s: float) -> StreamsAhead:
        running = self._running_streams()
        return StreamsAhead(self._idle_limit_s, self._lengths, running, now_s)

    def _running_streams(self) -> list[Request]:
        """Return the running streams with a promise."""
        return [
            request
            for request in self._queues.running.values()
            if request.is_stream and not request.is_best_effort
        ]

    def _ahead(self, request: Request, without: Collection[Request] = ()) -> _Ahead:
        """Return the requests that go before this one: begun, waiting, and how many more wait."""
        begun = [
            running
            for running in self._queues.running.values()
            if not running.is_stream
            and not running.is_best_effort
            and self._queues.goes_before(running, request)
        ]
        waiting, num_more = self._queues.waiting_before(request, self.prompt_s, _MOST_PLAYED)
        return begun, [one for one in waiting if one not in without], num_more

    def _play(self, ahead: _Ahead, streams: StreamsAhead, up_to_s: float) -> None:
        """Advance the streams until all requests ahead have been served."""
        begun, waiting, num_more = ahead
        for prompt in begun:
            self._serve([prompt], streams, up_to_s)
        for prompt in waiting[:_ALONE]:
            self._await_place([prompt], streams)
            self._serve([prompt], streams, up_to_s)
        begun_s, others = streams.elapsed_s, waiting[_ALONE:]
        for i in range(0, len(others), _TOGETHER):
            self._await_place(others[i : i + _TOGETHER], streams)
            self._serve(others[i : i + _TOGETHER], streams, up_to_s)
        if num_more:
            # The first requests may have found free places and slack that later ones do not.
            streams.elapsed_s += (streams.elapsed_s - begun_s) * num_more / len(others)

    def _ttft_s(
        self, request: Request, streams: StreamsAhead, now_s: float, up_to_s: float
    ) -> float:
        tenant = self._queues.tenant(request)
        leaves_room = self._queues.tenants.may_come(tenant, now_s, self._max_num_seqs)
        self._await_place([request], streams, for_others=leaves_room)
        self._prefill([request], streams, up_to_s, is_ahead=False)
        ttft_s = streams.elapsed_s + streams.rest_of_step * self._model.seconds(streams.shape)
        if self._queues.has_late(self._queues.tenant(request)):
            ttft_s /= 1.0 - LATE_SHARE
        return ttft_s * self._model.slowdown + self._fetch_time.seconds(request)

    def _serve(self, ahead: Sequence[Request], streams: StreamsAhead, up_to_s: float) -> None:
        if self._prefill(ahead, streams, up_to_s, is_ahead=True):
            streams.add(ahead)

    def prompt_s(self, request: Request) -> float:
        """Return the seconds that the rest of a request's prompt adds to a step."""
        start = request.num_tokens - request.num_missing_tokens
        return self._model.prefill_s(start, request.num_missing_tokens)

    def _await_place(
        self, requests: Sequence[Request], streams: StreamsAhead, *, for_others: bool = False
    ) -> None:
        """Advance until the requests find places and pace beside the streams that are left.

        Args:
            for_others: whether the requests must leave places to other tenants.
        """
        kept_places, kept_pace = (KEPT_PLACES, KEPT_PACE) if for_others else (0.0, 0.0)
        most_running = places_left(self._max_num_seqs, kept_places)
        while streams:
            num_missing = len(streams) + len(requests) - most_running
            if num_missing <= 0 and self._can_join(requests, streams, kept_pace):
                return
            num_steps = streams.until_end_of(num_missing) if num_missing > 0 else streams.num_steps
            streams.advance(num_steps, self._model.seconds(streams.shape))

    def _can_join(self, requests: Sequence[Request], streams: StreamsAhead, kept: float) -> bool:
        limit_s = min(streams.steady_limit_s, *[request.promise_s for request in requests])
        if limit_s == UNLIMITED:
            return True
        limit_s *= (1.0 - max(_SPARE, kept)) / self._model.slowdown
        if not self._budget.keeps_pace(streams.shape_with(requests), limit_s):
            return False
        shapes = streams.longest_steps(requests)
        return all(self._budget.keeps_pace(shape, limit_s) for shape in shapes)

    def _prefill(
        self,
        requests: Sequence[Request],
        streams: StreamsAhead,
        until_s: float,
        *,
        is_ahead: bool,
    ) -> bool:
        """Compute the rest of the prompts; False if that does not end in time."""
        prompts = _Prompts(requests)
        while prompts.num_left > 0 and streams.elapsed_s < until_s:
            chunk, num_steps = self._stroke(prompts, streams)
            if not chunk and prompts.has_begun and is_ahead:
                return False  # no chunk fits beside the streams: others pass this prompt
            step_s = self._step_s(streams, prompts, chunk)
            prompts.num_left -= math.ceil(num_steps * chunk)
            streams.advance(num_steps, step_s)
            if prompts.num_left <= 0 and streams.rest_of_step * chunk <= MIN_CHUNK:
                # The rest of the step is too short for another prompt.
                streams.advance(streams.rest_of_step, step_s)
        return prompts.num_left <= 0

    def _stroke(self, prompts: "_Prompts", streams: StreamsAhead) -> tuple[int, float]:
        """Return the prompts' tokens per step, and the number of such steps."""
        most_steps, middle = streams.num_steps, prompts.middle
        limit_s = streams.limit_s
        safety_factor = self._model.prefill_safety_factor(streams.shape, limit_s)
        settled_s = streams.settled_limit_s(safety_factor)
        chunk = self._chunk(middle, streams, limit_s)
        if not chunk:
            return 0, most_steps
        num_steps = min(most_steps, prompts.num_left / chunk)
        if limit_s == settled_s or num_steps <= 1.0:
            return chunk, num_steps
        if chunk + streams.shape.num_tokens >= self._longest_chunk:
            spent_s = self._step_s(streams, prompts, chunk) - streams.steady_limit_s
            if limit_s > settled_s and spent_s > 0.0:
                num_steps = min(num_steps, max(1.0, (limit_s - settled_s) / spent_s))
            return chunk, num_steps
        # A step takes `limit / safety_factor`: the limit approaches its settled value in steps.
        kept = 1.0 - 1.0 / safety_factor
        mean = (1.0 - kept**num_steps) / (num_steps * (1.0 - kept))
        chunk = max(1, self._chunk(middle, streams, settled_s + (limit_s - settled_s) * mean))
        return chunk, min(most_steps, prompts.num_left / chunk)

    def _chunk(self, start: int, streams: StreamsAhead, limit_s: float) -> int:
        chunk = self._budget.max_chunk(streams.shape, start, self._longest_chunk, limit_s)
        return chunk if chunk or streams else MIN_CHUNK

    def _step_s(self, streams: StreamsAhead, prompts: "_Prompts", chunk: int) -> float:
        """Return the seconds of a step filled with such chunks of the prompts."""
        step_s = self._model.seconds(streams.shape)
        if chunk:
            own = min(chunk, prompts.num_left)
            # Waiting prompts, assumed to be like it, fill the rest of the step.
            count = min(chunk / own, 1.0 + self._queues.num_waiting)
            mean_start = max(0, prompts.middle - own // 2)
            step_s += count * self._model.chunk_s(streams.shape, mean_start, own)
        return step_s


class _Prompts:
    """Prompts, each computed as if it had their mean length.

    Attributes:
        num_left: tokens not yet computed.
    """

    __slots__ = ("_count", "_num_tokens", "num_left")

    def __init__(self, requests: Sequence[Request]) -> None:
        self._count = len(requests)
        self._num_tokens = sum([request.num_tokens for request in requests])
        self.num_left = sum([request.num_missing_tokens for request in requests])

    @property
    def has_begun(self) -> bool:
        return self.num_left < self._num_tokens

    @property
    def middle(self) -> int:
        """Mean position of the tokens that are left."""
        return (2 * self._num_tokens - self.num_left) // (2 * self._count)


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
        # One more step may be under way, and late prompts have their share.
        return (1 + num_steps / (1.0 - LATE_SHARE)) * step_s * self._model.slowdown

    def _streams_and_room_s(self) -> tuple[float, float]:
        """Return the seconds of a step that streams take and leave; cached for one step."""
        if self._beside_s is None:
            streams_s = self._model.seconds(self._streams)
            room_s = UNLIMITED
            if self._limit_s < UNLIMITED:
                safety_factor = self._model.prefill_safety_factor(self._streams, self._limit_s)
                room_s = self._limit_s / safety_factor - streams_s
                room_s = max(room_s, _LEAST_ROOM * self._limit_s, _LEAST_ROOM * streams_s, _LEAST_S)
            self._beside_s = streams_s, room_s
        return self._beside_s


class Outlook:
    """Forecasts for a request not yet sent, for routers that choose among engines.

    It is of the tenant with most requests waiting, and goes behind all of them: a prompt that may
    pass them delays them.

    Args:
        slo: the promise to the request.
        max_model_len: in tokens.
    """

    def __init__(
        self, forecast: Forecast, queues: Queues, slo: SloClass, max_model_len: int
    ) -> None:
        self._forecast = forecast
        self._queues = queues
        self._long = min(_LONG, max_model_len // 2)
        self._slo = slo
        self._max_model_len = max_model_len

    def ttft_s(self, now_s: float) -> tuple[float, float]:
        """Return the seconds that an empty prompt waits, and the seconds that each token adds."""
        shortest, long = self._request(1, now_s), self._request(self._long, now_s)
        found = self._forecast.two_ttfts_s(shortest, long, now_s, _HORIZON_S)
        if found is None:
            return 0.0, 0.0
        shortest_s, long_s = found
        if self._long == 1:
            return shortest_s, 0.0
        return shortest_s, max(0.0, long_s - shortest_s) / (self._long - 1)

    def itl_s(self) -> tuple[float, float]:
        """Return the seconds of a decode step with one stream more, and of each stream beyond."""
        return self._forecast.stream_step_s(self._long) or (0.0, 0.0)

    def _request(self, num_tokens: int, now_s: float) -> Request:
        tenant = self._queues.most_waiting()
        message = AddRequest(
            request_id="",
            prompt_token_ids=token_array((0,)) * num_tokens,
            params=SamplingParams(max_tokens=1),
            service=ServiceParams(
                tenant=NEWCOMER if tenant is None else tenant.name, priority=MAX_PRIORITY
            ),
            arrival_time_s=now_s,
        )
        request = Request(message, self._slo, self._max_model_len)
        request.is_late = True
        return request
