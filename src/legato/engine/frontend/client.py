"""The HTTP server's side of the engine: keeps its process running and talks to it."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AbortRequest, AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.stats import EngineStats
from legato.core.step_record import StepRecord, received
from legato.engine.errors import EngineDeadError, OverloadedError, RequestFailedError
from legato.engine.frontend.completion import CompletionDelta
from legato.engine.frontend.completion_stream import CompletionStream
from legato.engine.frontend.output_queue import OutputQueue
from legato.engine.frontend.requests import build_requests
from legato.engine.process.engine_process import EngineProcess
from legato.engine.process.messages import (
    EngineInfo,
    Reconfigure,
    SetRecording,
    StepOutputs,
)
from legato.engine.process.restarts import Restarts
from legato.model.source import resolve_source
from legato.model.tokenizer import Tokenizer, load_tokenizer
from legato.observe.traces.feed import RecordFeed

logger = logging.getLogger(__name__)


class _Job:
    """The requests of one prompt.

    Attributes:
        outputs: of all of them.
        has_begun: whether anything has come of them.
        is_rerun: whether an engine has died under them before.
    """

    def __init__(self, requests: list[AddRequest], outputs: OutputQueue) -> None:
        self.requests = requests
        self.outputs = outputs
        self.has_begun = False
        self.is_rerun = False


class EngineClient:
    """An engine process, its tokenizer, and the streams of the requests it holds.

    When the process dies, another is started. Requests of which nothing has come yet are sent to
    it, once; all others end with an error.

    Attributes:
        info: of the engine that was started first; those after it have the same configuration.
        is_alive: whether there is an engine, or will be again.
        death: why there is none, if so.
        most_batched_tokens: the largest token budget that `reconfigure` takes.
        on_step: told of each step.
        records: of what the engine does; made while somebody has subscribed.
    """

    def __init__(
        self,
        config: EngineConfig,
        connection: EngineProcess,
        info: EngineInfo,
        tokenizer: Tokenizer,
        *,
        loading_s: float,
        max_unread_tokens: int,
        timeout_s: float,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.stats = EngineStats()
        self.is_alive = True
        self.death = ""
        self.on_step: Callable[[StepRecord], object] = lambda _: None
        self.records = RecordFeed(self._set_recording)
        self._config = config
        self.most_batched_tokens = _most_batched_tokens(config.scheduler, info.max_model_len)
        self._max_unread_tokens = max_unread_tokens
        self._timeout_s = timeout_s
        self._heard_s = 0.0  # when the engine last said something, or had nothing to say before
        self._connection: EngineProcess | None = connection  # None while there is no engine
        self._restarts = Restarts(loading_s)
        self._jobs: dict[str, _Job] = {}  # key engine request id
        self._ids = itertools.count()
        self._running = asyncio.create_task(self._keep_running(connection))

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        served_model_name: str | None = None,
        max_unread_tokens: int = 2048,
        timeout_s: float = 300.0,
    ) -> "EngineClient":
        """Start the engine process and wait until its model is loaded.

        Args:
            max_unread_tokens: of a completion that may wait to be taken from `generate`; one more
                ends its stream.
            timeout_s: how long an engine with requests may say nothing before it counts as dead.

        Raises:
            ConfigError: the settings or the checkpoint cannot be served.
            EngineDeadError: the process died while loading.
        """
        started_s = time.monotonic()
        source = await asyncio.to_thread(resolve_source, config.model.model, config.model.revision)
        connection = await EngineProcess.open(config)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, source)
            await asyncio.to_thread(tokenizer.warm_up)
            info = await connection.ready()
        except BaseException:
            connection.kill()
            raise
        return cls(
            config,
            connection,
            info.renamed(served_model_name),
            tokenizer,
            loading_s=time.monotonic() - started_s,
            max_unread_tokens=max_unread_tokens,
            timeout_s=timeout_s,
        )

    @property
    def num_restarts(self) -> int:
        return self._restarts.count

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The settings in effect, as they were asked for."""
        return self._config.scheduler

    def reconfigure(self, scheduler: SchedulerConfig) -> None:
        """Plan by other settings from the next step on; requests that run go on.

        Args:
            scheduler: with the same `max_num_seqs` and the same classes of service by name.

        Raises:
            ConfigError: they contradict each other, or want longer steps than this engine may run.
            EngineDeadError: there is no engine just now.
        """
        resolved = scheduler.resolve(self.info.max_model_len)
        assert resolved.max_num_batched_tokens is not None
        if resolved.max_num_batched_tokens > self.most_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens may be {self.most_batched_tokens} at most on a running "
                f"server, got {resolved.max_num_batched_tokens}"
            )
        self.check_running()
        assert self._connection is not None
        self._config = msgspec.structs.replace(self._config, scheduler=scheduler)
        self._connection.send(Reconfigure(resolved))

    def check_running(self) -> None:
        """Raises `EngineDeadError` where there is no engine just now."""
        if not self.is_alive:
            raise EngineDeadError(f"the engine is gone: {self.death}")
        if self._connection is None:
            raise EngineDeadError(
                "the engine process died and is being restarted",
                retry_after_s=self._restarts.seconds_left,
            )

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        service: ServiceParams,
        request_id: str,
    ) -> AsyncGenerator[CompletionDelta]:
        """Stream the `params.n` completions of a prompt, merged; a delta's index tells them apart.

        Closing the generator aborts what still runs.

        Raises:
            InvalidRequestError: the request can never be served as asked.
            OverloadedError: too many requests are waiting, or the TTFT SLO cannot be met.
            RequestFailedError: this request cannot be computed.
            SlowReaderError: the deltas were not taken for so long that the requests were aborted.
            EngineDeadError: the engine process died under it, or is not running.
        """
        requests = build_requests(
            prompt_token_ids,
            params,
            service=service,
            request_id=f"{next(self._ids)}-{request_id}",
            info=self.info,
            arrival_time_s=time.monotonic(),
        )
        streams = {
            request.request_id: CompletionStream(i, request, self.tokenizer)
            for i, request in enumerate(requests)
        }
        job = _Job(requests, OutputQueue(len(requests) * self._max_unread_tokens))
        try:
            self._submit(job)
            while streams:
                output = await job.outputs.get()
                _raise_if_failed(output)
                stream = streams.get(output.request_id)
                if stream is None:
                    continue
                delta = stream.push(output)
                if delta.finish_reason is not None:
                    del streams[output.request_id]
                    self._forget(output.request_id, abort=stream.needs_abort)
                yield delta
        finally:
            for unfinished in streams:
                self._forget(unfinished, abort=True)

    async def close(self) -> None:
        """End the engine process; what still runs in it is lost."""
        self._running.cancel()
        self._give_up("it was stopped")
        await asyncio.wait([self._running])

    def _submit(self, job: _Job) -> None:
        self.check_running()
        assert self._connection is not None
        if not self._jobs:
            self._heard_s = time.monotonic()
        for request in job.requests:
            self._jobs[request.request_id] = job
            self._connection.send(request)

    def _forget(self, request_id: str, *, abort: bool) -> None:
        known = self._jobs.pop(request_id, None) is not None
        if known and abort and self._connection is not None:
            self._connection.send(AbortRequest(request_id=request_id))

    async def _keep_running(self, connection: EngineProcess) -> None:
        """Pass on what the engine tells, and start another whenever it dies."""
        try:
            while True:
                self._connection = connection
                if self.records.is_wanted:
                    self._set_recording(True)
                self._heard_s = time.monotonic()
                self._send_again(connection)
                watching = asyncio.create_task(self._end_if_it_hangs(connection))
                try:
                    async for step in connection.steps():
                        self._take(step)
                finally:
                    watching.cancel()
                    self._connection = None
                    status = await connection.close()
                logger.error("the engine process ended unexpectedly: %s", status)
                self._restarts.note_death()
                self._end_those_begun()
                self.stats = EngineStats(num_waiting=len(self._jobs))
                connection = await self._restart()
        except (ConfigError, EngineDeadError) as error:
            self._give_up(str(error))
        except Exception as error:
            logger.exception("cannot go on")
            self._give_up(f"{type(error).__name__}: {error}")

    async def _end_if_it_hangs(self, connection: EngineProcess) -> None:
        while True:
            await asyncio.sleep(self._timeout_s / 10)
            silent_s = time.monotonic() - self._heard_s
            if self._jobs and silent_s > self._timeout_s:
                told = "the engine has %d requests and has said nothing for %.0f s: it is killed"
                logger.error(told, len(self._jobs), silent_s)
                connection.abandon()
                return

    async def _restart(self) -> EngineProcess:
        """A new engine; raises as `EngineProcess.ready` where there is no point in going on."""
        while True:
            logger.info("starting the engine again")
            connection = await EngineProcess.open(self._config)
            try:
                await connection.ready()
            except EngineDeadError as error:
                connection.kill()
                logger.error("%s", error)
                self._restarts.note_death()
            except BaseException:
                connection.kill()
                raise
            else:
                self._restarts.note_ready()
                return connection

    def _set_recording(self, is_on: bool) -> None:
        if self._connection is not None:
            self._connection.send(SetRecording(is_on))

    def _take(self, step: StepOutputs) -> None:
        self.stats = step.stats
        now_s = self._heard_s = time.monotonic()
        records = [received(record, now_s) for record in step.records]
        for record in records:
            if isinstance(record, StepRecord):
                self.on_step(record)
        self.records.publish(records)
        for output in step.outputs:
            job = self._jobs.get(output.request_id)
            if job is not None:
                job.has_begun = True
                if not job.outputs.put(msgspec.structs.replace(output, received_s=now_s)):
                    self._forget(output.request_id, abort=True)

    def _end_those_begun(self) -> None:
        """And those under which an engine died before: they may be what it dies of."""
        for job in dict.fromkeys(self._jobs.values()):
            if job.has_begun or job.is_rerun:
                for request in job.requests:
                    self._jobs.pop(request.request_id, None)
                error = "the engine process died while it held this request"
                job.outputs.close(EngineDeadError(error, retry_after_s=self._restarts.seconds_left))
            job.is_rerun = True

    def _send_again(self, connection: EngineProcess) -> None:
        """What an engine had taken before it died, in the order in which it came."""
        for job in dict.fromkeys(self._jobs.values()):
            for request in job.requests:
                if request.request_id in self._jobs:
                    connection.send(msgspec.structs.replace(request, is_rerun=True))

    def _give_up(self, reason: str) -> None:
        self.is_alive = False
        self.death = reason
        for job in dict.fromkeys(self._jobs.values()):
            job.outputs.close(EngineDeadError(f"the engine is gone: {reason}"))


def _raise_if_failed(output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.REFUSED:
        assert output.refusal is not None
        raise OverloadedError(
            output.error or "overloaded",
            reason=output.refusal,
            retry_after_s=output.retry_after_s or 0.0,
        )
    if output.finish_reason is FinishReason.ERROR:
        raise RequestFailedError(output.error or "the request failed")


def _most_batched_tokens(config: SchedulerConfig, max_model_len: int) -> int:
    """What it starts with, or what any whole prompt takes, which a server must bear as well."""
    started_with = config.resolve(max_model_len).max_num_batched_tokens
    assert started_with is not None
    return max(started_with, config.whole_prompt_tokens(max_model_len))
