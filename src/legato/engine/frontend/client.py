"""The HTTP server's side of the engine: requests in, outputs to whoever takes them."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.kv_events import AllBlocksCleared, KVEvent
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AbortRequest, AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.stats import EngineStats
from legato.core.step_record import LiveRecord, Record, RequestSent, StepBegun, StepRecord, received
from legato.engine.errors import EngineDeadError, OverloadedError, failure
from legato.engine.frontend.completion import CompletionStream
from legato.engine.frontend.deliveries import Deliveries, StreamDelivery
from legato.engine.frontend.requests import build_requests
from legato.engine.frontend.submission import Submission, Take
from legato.engine.process.engine_process import EngineProcess
from legato.engine.process.messages import (
    Delivered,
    EngineInfo,
    KnowVocabulary,
    Reconfigure,
    SetAnnouncing,
    SetRecording,
    StepOutputs,
    WatchCache,
)
from legato.engine.process.supervisor import EngineSupervisor
from legato.model.defaults import ModelDefaults, within_vocabulary
from legato.model.vocabulary import Vocabulary
from legato.observe.traces.feed import RecordFeed
from legato.observe.traces.recent_steps import RecentSteps


class _Running:
    """A request that has not ended.

    Attributes:
        prompt_index: in its submission.
        request: as it is sent, again perhaps.
        stream: what comes of it.
        has_begun: whether anything has.
        delivery: of its tokens to who reads them.
    """

    def __init__(
        self,
        submission: Submission,
        prompt_index: int,
        request: AddRequest,
        stream: CompletionStream,
    ) -> None:
        self.submission = submission
        self.prompt_index = prompt_index
        self.request = request
        self.stream = stream
        self.delivery = StreamDelivery(request.service.slo_class)
        self.has_begun = False


class EngineClient:
    """An engine process, its vocabulary, and the streams of the requests it holds.

    Where another process is started in the place of one that died, requests of which nothing has
    come yet are sent to it, once; all others end with an error.

    Attributes:
        info: of the engine that was started first; those after it have the same configuration.
        defaults: what the checkpoint says about how to generate from it.
        most_batched_tokens: the largest token budget that `reconfigure` takes.
        on_step: told of each step.
        records: of what the engine does; made while somebody has subscribed.
        live: what is told before it is over; likewise.
        recent: the latest steps, whether anybody has subscribed or not.
        deliveries: of tokens to those who read their streams.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine: EngineProcess,
        info: EngineInfo,
        vocabulary: Vocabulary,
        defaults: ModelDefaults,
        *,
        timeout_s: float,
    ) -> None:
        self.info = info
        self.vocabulary = vocabulary
        self.defaults = defaults
        self.stats = EngineStats()
        self.on_step: Callable[[StepRecord], object] = lambda _: None
        self.records = RecordFeed[Record](self._set_recording)
        self.live = RecordFeed[LiveRecord](self._set_announcing)
        self.recent = RecentSteps()
        self.deliveries = Deliveries(
            config.scheduler.classes, lambda later_s: self._supervisor.send(Delivered(later_s))
        )
        resolved = config.scheduler.resolve(info.max_model_len, info.device)
        self.most_batched_tokens = resolved.most_batched_tokens(info.max_model_len, info.device)
        self._running: dict[str, _Running] = {}  # key engine request id
        self._cache_watchers: list[Callable[[Sequence[KVEvent]], object]] = []
        self._ids = itertools.count()
        self._supervisor = EngineSupervisor(config, engine, self, timeout_s=timeout_s)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        text: Awaitable[tuple[Vocabulary, ModelDefaults]],
        *,
        served_model_names: Sequence[str] = (),
        timeout_s: float = 300.0,
    ) -> "EngineClient":
        """Start the engine process and wait until its model is loaded.

        Args:
            served_model_names: as of `EngineInfo.renamed`.
            text: what the model's tokens stand for, and how its makers would generate; awaited
                while the engine loads.
            timeout_s: how long an engine with requests may say nothing before it counts as dead.

        Raises:
            ConfigError: the settings or the checkpoint cannot be served.
            EngineDeadError: the process died while loading.
            Exception: what awaiting `text` raises.
        """
        async with EngineProcess.starting(config) as engine:
            vocabulary, defaults = await text
            info = await engine.ready()
            defaults = within_vocabulary(defaults, vocabulary.num_ids, info.vocab_size)
        return cls(
            config,
            engine,
            info.renamed(served_model_names),
            vocabulary,
            defaults,
            timeout_s=timeout_s,
        )

    @property
    def is_alive(self) -> bool:
        """Whether there is an engine, or will be again."""
        return self._supervisor.is_alive

    @property
    def death(self) -> str:
        """Why there is no engine any more, if so."""
        return self._supervisor.death

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    @property
    def engine_pid(self) -> int | None:
        """Of the process that runs; None while there is none."""
        return self._supervisor.engine_pid

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The settings in effect, as they were asked for."""
        return self._supervisor.config.scheduler

    def reconfigure(self, scheduler: SchedulerConfig) -> None:
        """Plan by other settings from the next step on; requests that run go on.

        Args:
            scheduler: with the same `max_num_seqs` and the same classes of service by name.

        Raises:
            ConfigError: they contradict each other, or want longer steps than this engine may run.
            EngineDeadError: there is no engine just now.
        """
        resolved = scheduler.resolve(self.info.max_model_len, self.info.device)
        assert resolved.max_num_batched_tokens is not None
        if resolved.max_num_batched_tokens > self.most_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens may be {self.most_batched_tokens} at most on a running "
                f"server, got {resolved.max_num_batched_tokens}"
            )
        supervisor = self._supervisor
        supervisor.check_running()
        supervisor.config = msgspec.structs.replace(supervisor.config, scheduler=scheduler)
        supervisor.send(Reconfigure(resolved))
        self.deliveries.promise(scheduler.classes)

    def watch_cache(self, tell: Callable[[Sequence[KVEvent]], object]) -> None:
        """Have somebody told what is cached, and what becomes of it, for good.

        Args:
            tell: is given events that go together, in their order, the first of which is an
                `AllBlocksCleared`. Another may come at any time, with all that there is then.
        """
        self._cache_watchers.append(tell)
        self._supervisor.send(WatchCache())

    @property
    def unfinished(self) -> list[RequestSent]:
        """Requests that have come and not ended, in the order in which they came."""
        return [_sent(running.request) for running in self._running.values()]

    def check_running(self) -> None:
        """Raises `EngineDeadError` where there is no engine just now."""
        self._supervisor.check_running()

    @asynccontextmanager
    async def submitted(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        service: ServiceParams,
        request_id: str,
        take: Take,
    ) -> AsyncGenerator[Submission]:
        """Have the `params.n` completions of each prompt made; leaving aborts what still runs.

        Args:
            prompts: token ids of each.
            take: given each delta, as it comes.

        Raises:
            InvalidRequestError: a prompt can never be served as asked.
            EngineDeadError: the engine process is not running.

        `Submission.check` raises what comes later:
            OverloadedError: too many requests are waiting, or the TTFT SLO cannot be met.
            RequestFailedError: one of the prompts cannot be computed.
            EngineDeadError: the engine process died under it.
            Exception: what `take` raised.
        """
        submission = Submission(len(prompts) * params.n, take)
        try:
            for index, prompt in enumerate(prompts):
                requests = build_requests(
                    prompt,
                    params,
                    service=service,
                    request_id=f"{next(self._ids)}-{request_id}",
                    info=self.info,
                    eos_token_ids=self.defaults.eos_token_ids,
                    arrival_time_s=time.monotonic(),
                )
                self.check_running()
                for i, request in enumerate(requests):
                    stream = CompletionStream(i, request, self.vocabulary)
                    self._send(_Running(submission, index, request, stream))
                    await asyncio.sleep(0)  # each carries the whole prompt
                if submission.ended.is_set():
                    break
            yield submission
        finally:
            self._abort(submission)

    async def close(self, *, at_once: bool = False) -> None:
        """End the engine process; what still runs in it is lost.

        Args:
            at_once: without waiting for the end of its step.
        """
        await self._supervisor.close(at_once=at_once)

    def _send(self, running: _Running) -> None:
        request_id = running.request.request_id
        running.submission.request_ids.append(request_id)
        self._running[request_id] = running
        self._supervisor.send(running.request)
        if self.live.is_wanted:
            self.live.publish([_sent(running.request)])

    def _forget(self, request_id: str, *, abort: bool) -> None:
        known = self._running.pop(request_id, None) is not None
        if known and abort:
            self._supervisor.send(AbortRequest(request_id=request_id))

    def _abort(self, submission: Submission) -> None:
        """What still runs of it."""
        for request_id in submission.request_ids:
            self._forget(request_id, abort=True)

    def _fail(self, submission: Submission, error: Exception) -> None:
        submission.fail(error)
        self._abort(submission)

    def _set_recording(self, is_on: bool) -> None:
        self._supervisor.send(SetRecording(is_on))

    def _set_announcing(self, is_on: bool) -> None:
        self._supervisor.send(SetAnnouncing(is_on))

    # What the supervisor tells: this is its `EngineListener`.

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def engine_is_ready(self) -> None:
        """Send what an engine had taken before it died, in the order in which it came."""
        if self.vocabulary.num_ids:  # a caller may go without
            self._supervisor.send(KnowVocabulary(self.vocabulary))
        if self.records.is_wanted:
            self._set_recording(True)
        if self.live.is_wanted:
            self._set_announcing(True)
        if self._cache_watchers:
            self._supervisor.send(WatchCache())
        for running in self._running.values():
            self._supervisor.send(running.request)

    def note_begun(self, step: StepBegun) -> None:
        """Tell those who watch."""
        self.live.publish([step])

    def take_step(self, step: StepOutputs) -> None:
        """Hand on all outputs in one pass."""
        now_s = time.monotonic()
        self.stats = step.stats
        records = [received(record, now_s) for record in step.records]
        for record in records:
            if isinstance(record, StepRecord):
                self.on_step(record)
                self.recent.note(record)
        self.records.publish(records)
        self._tell_of_cache(step.kv_events)
        given: list[StreamDelivery] = []
        for output in step.outputs:
            running = self._running.get(output.request_id)
            if running is not None:
                self._take(running, output, now_s)
                if output.new_token_ids and not output.is_promise_waived:
                    given.append(running.delivery)
        self._note_delivery(step, given)

    def _tell_of_cache(self, events: Sequence[KVEvent]) -> None:
        if events:
            for tell in self._cache_watchers:
                tell(events)

    def _take(self, running: _Running, output: RequestOutput, now_s: float) -> None:
        running.has_begun = True
        try:
            _raise_if_failed(output)
            delta = running.stream.push(output, now_s)
            if delta.finish_reason is not None:
                self._forget(output.request_id, abort=running.stream.needs_abort)
            running.submission.take(running.prompt_index, delta)
        except Exception as error:  # whatever it is, it is no other stream's
            self._fail(running.submission, error)

    def _note_delivery(self, step: StepOutputs, given: list[StreamDelivery]) -> None:
        """Once all tokens of the step have been written."""
        ran = next((record for record in step.records if isinstance(record, StepRecord)), None)
        if ran is not None:
            is_mixed = ran.num_prefill_tokens > 0 and ran.num_decode_tokens > 0
            self.deliveries.note(given, ran.ended_s, is_mixed=is_mixed)

    def engine_died(self, retry_after_s: float) -> None:
        """End what has begun, and that under which an engine died before: it may be why."""
        message = "the engine process died while it held this request"
        for running in tuple(self._running.values()):
            if running.has_begun or running.request.is_rerun:
                error = EngineDeadError(message, retry_after_s=retry_after_s)
                self._fail(running.submission, error)
            running.request = msgspec.structs.replace(running.request, is_rerun=True)
        self.stats = EngineStats(num_waiting=len(self._running))
        self.recent.clear()
        self._tell_of_cache([AllBlocksCleared()])

    def engine_is_given_up(self, reason: str) -> None:
        """End everything."""
        for running in tuple(self._running.values()):
            self._fail(running.submission, EngineDeadError(f"the engine is gone: {reason}"))


def _sent(request: AddRequest) -> RequestSent:
    return RequestSent(
        request_id=request.request_id,
        arrived_s=request.arrival_time_s,
        num_prompt_tokens=len(request.prompt_token_ids),
        slo_class=request.service.slo_class,
    )


def _raise_if_failed(output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.REFUSED:
        assert output.refusal is not None
        raise OverloadedError(
            output.error or "overloaded",
            reason=output.refusal,
            retry_after_s=output.retry_after_s or 0.0,
        )
    if output.finish_reason is FinishReason.ERROR:
        raise failure(output)
