"""The HTTP server's side of the engine: requests in, outputs to their streams."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial

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
from legato.engine.frontend.completion import CompletionDelta, CompletionStream
from legato.engine.frontend.deliveries import Deliveries, Given, StreamDeliveries
from legato.engine.frontend.output_queue import OutputQueue
from legato.engine.frontend.requests import build_requests
from legato.engine.process.engine_process import EngineProcess
from legato.engine.process.messages import (
    Delivered,
    EngineInfo,
    Reconfigure,
    SetRecording,
    StepOutputs,
)
from legato.engine.process.supervisor import EngineSupervisor
from legato.model.defaults import ModelDefaults, within_vocabulary
from legato.model.vocabulary import Vocabulary
from legato.observe.traces.feed import RecordFeed


class _PromptRequests:
    """The requests of one prompt.

    Attributes:
        deliveries: of all of them.
        outputs: of all of them.
        has_begun: whether anything has come of them.
        is_rerun: whether an engine has died under them before.
    """

    def __init__(self, requests: list[AddRequest], outputs: OutputQueue) -> None:
        self.requests = requests
        self.deliveries = StreamDeliveries(requests[0].service.slo_class)
        self.outputs = outputs
        self.has_begun = False
        self.is_rerun = False


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
        max_unread_tokens: int,
        timeout_s: float,
    ) -> None:
        self.info = info
        self.vocabulary = vocabulary
        self.defaults = defaults
        self.stats = EngineStats()
        self.on_step: Callable[[StepRecord], object] = lambda _: None
        self.records = RecordFeed(self._set_recording)
        self.deliveries = Deliveries(
            config.scheduler.classes, lambda later_s: self._supervisor.send(Delivered(later_s))
        )
        self.most_batched_tokens = _most_batched_tokens(config.scheduler, info.max_model_len)
        self._max_unread_tokens = max_unread_tokens
        self._unfinished: dict[str, _PromptRequests] = {}  # key engine request id
        self._ids = itertools.count()
        self._supervisor = EngineSupervisor(config, engine, self, timeout_s=timeout_s)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        text: Awaitable[tuple[Vocabulary, ModelDefaults]],
        *,
        served_model_name: str | None = None,
        max_unread_tokens: int = 2048,
        timeout_s: float = 300.0,
    ) -> "EngineClient":
        """Start the engine process and wait until its model is loaded.

        Args:
            text: what the model's tokens stand for, and how its makers would generate; awaited
                while the engine loads.
            max_unread_tokens: of a completion that may wait to be taken from `generate`; one more
                ends its stream.
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
            info.renamed(served_model_name),
            vocabulary,
            defaults,
            max_unread_tokens=max_unread_tokens,
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
        resolved = scheduler.resolve(self.info.max_model_len)
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

    def check_running(self) -> None:
        """Raises `EngineDeadError` where there is no engine just now."""
        self._supervisor.check_running()

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
            eos_token_ids=self.defaults.eos_token_ids,
            arrival_time_s=time.monotonic(),
        )
        streams = {
            request.request_id: CompletionStream(i, request, self.vocabulary)
            for i, request in enumerate(requests)
        }
        prompt = _PromptRequests(requests, OutputQueue(len(requests) * self._max_unread_tokens))
        try:
            await self._submit(prompt)
            while streams:
                output, received_s = await prompt.outputs.get()
                _raise_if_failed(output)
                stream = streams.get(output.request_id)
                if stream is None:
                    continue
                delta = stream.push(output, received_s)
                if delta.finish_reason is not None:
                    del streams[output.request_id]
                    self._forget(output.request_id, abort=stream.needs_abort)
                yield delta
        finally:
            for unfinished in streams:
                self._forget(unfinished, abort=True)

    async def close(self) -> None:
        """End the engine process; what still runs in it is lost."""
        await self._supervisor.close()

    async def _submit(self, prompt: _PromptRequests) -> None:
        self.check_running()
        for request in prompt.requests:
            self._unfinished[request.request_id] = prompt
            self._supervisor.send(request)
            await asyncio.sleep(0)  # each carries the whole prompt

    def _forget(self, request_id: str, *, abort: bool) -> None:
        known = self._unfinished.pop(request_id, None) is not None
        if known and abort:
            self._supervisor.send(AbortRequest(request_id=request_id))

    def _set_recording(self, is_on: bool) -> None:
        self._supervisor.send(SetRecording(is_on))

    # What the supervisor tells: this is its `EngineListener`.

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def engine_is_ready(self) -> None:
        """Send what an engine had taken before it died, in the order in which it came."""
        if self.records.is_wanted:
            self._set_recording(True)
        for prompt in self._prompts():
            for request in prompt.requests:
                if request.request_id in self._unfinished:
                    self._supervisor.send(msgspec.structs.replace(request, is_rerun=True))

    def take_step(self, step: StepOutputs) -> None:
        """Hand each output to its request's stream."""
        now_s = time.monotonic()
        self.stats = step.stats
        records = [received(record, now_s) for record in step.records]
        for record in records:
            if isinstance(record, StepRecord):
                self.on_step(record)
        self.records.publish(records)
        given: list[Given] = []
        for output in step.outputs:
            prompt = self._unfinished.get(output.request_id)
            if prompt is not None:
                prompt.has_begun = True
                if output.new_token_ids and not output.is_promise_waived:
                    given.append((prompt.deliveries, output.request_id))
                if not prompt.outputs.put(output, now_s):
                    self._forget(output.request_id, abort=True)

        self._note_delivery(step, given)

    def _note_delivery(self, step: StepOutputs, given: list[Given]) -> None:
        """Once all streams that wait for an output of the step have passed it on."""
        ran = next((record for record in step.records if isinstance(record, StepRecord)), None)
        if ran is None:
            return
        is_mixed = ran.num_prefill_tokens > 0 and ran.num_decode_tokens > 0
        note = partial(self.deliveries.note, given, ran.ended_s, is_mixed=is_mixed)
        # Each of them was woken before, and runs until it has written its token.
        asyncio.get_running_loop().call_soon(note)

    def engine_died(self, retry_after_s: float) -> None:
        """End what has begun, and that under which an engine died before: it may be why."""
        for prompt in self._prompts():
            if prompt.has_begun or prompt.is_rerun:
                for request in prompt.requests:
                    self._unfinished.pop(request.request_id, None)
                error = "the engine process died while it held this request"
                prompt.outputs.close(EngineDeadError(error, retry_after_s=retry_after_s))
            prompt.is_rerun = True
        self.stats = EngineStats(num_waiting=len(self._unfinished))

    def engine_is_given_up(self, reason: str) -> None:
        """End everything."""
        for prompt in self._prompts():
            prompt.outputs.close(EngineDeadError(f"the engine is gone: {reason}"))

    def _prompts(self) -> list[_PromptRequests]:
        """Those with unfinished requests, in the order in which they came."""
        return list(dict.fromkeys(self._unfinished.values()))


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
