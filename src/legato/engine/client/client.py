"""The HTTP server's side of an engine process: sends requests, delivers outputs."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager

import msgspec

from legato.checkpoint.defaults import ModelDefaults, within_vocabulary
from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.kv_events import AllBlocksCleared, KVEvent
from legato.core.request import AbortRequest, AddRequest
from legato.core.stats import EngineStats, KeptPromise, ReplicaStats
from legato.core.step_record import EngineRecord, RequestSent, StepBegun, StepRecord
from legato.core.vocabulary import Vocabulary
from legato.engine.client.deliveries import Deliveries
from legato.engine.client.kv_tickets import Tickets
from legato.engine.client.settings import RunningSettings
from legato.engine.client.submissions import Submission, Submissions, Take, Unfinished
from legato.engine.errors import EngineDeadError
from legato.engine.process.engine_messages import (
    EngineInfo,
    ForgetCache,
    SetAnnouncing,
    SetRecording,
    SetVocabulary,
    StepDelivered,
    StepOutputs,
    WatchCache,
)
from legato.engine.process.engine_process import EngineProcess
from legato.engine.process.supervisor import EngineSupervisor
from legato.observe.traces.feed import Activity, sent

logger = logging.getLogger(__name__)


class EngineClient:
    """An engine process with its vocabulary and unfinished requests: an `Engine`.

    If the process dies and another is started, requests without any output yet are sent to the new
    one, once; all others end with an error.

    Attributes:
        info: of the engine that was started first; later ones have the same configuration.
        defaults: the checkpoint's recommendations, within the model's vocabulary.
        tickets: reads and writes requests' parameters for transfers between engines.
        settings: the scheduler's, which `reconfigure` changes.
        activity: publishes records of the engine's work.
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
        self.tickets = Tickets(config.transfer, info.transfer)
        self.stats = EngineStats()
        self.replicas: dict[str, ReplicaStats] = {}
        self.activity = Activity(self._set_recording, self._set_announcing)
        self._deliveries = Deliveries(
            config.scheduler.classes,
            lambda delay_change_s: self._supervisor.send(StepDelivered(delay_change_s)),
        )
        self._cache_watchers: list[Callable[[Sequence[KVEvent]], object]] = []
        self._submissions = Submissions(
            check_running=self.check_running, send=self._send, abort=self._abort
        )
        self._supervisor = EngineSupervisor(config, engine, self, timeout_s=timeout_s)
        self.settings = RunningSettings(config.scheduler, info)
        self.settings.watch(lambda now: self._supervisor.reconfigure(now.resolved))
        self.settings.watch(lambda now: self._deliveries.promise(now.asked.classes))

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        text: Awaitable[tuple[Vocabulary, ModelDefaults]],
        *,
        served_model_names: Sequence[str] = (),
        timeout_s: float = 300.0,
        on_part: Callable[[str, float], object] = lambda *_: None,
    ) -> "EngineClient":
        """Start the engine process and wait until its model is loaded.

        Args:
            served_model_names: as of `EngineInfo.renamed`.
            text: the vocabulary and the checkpoint's defaults; awaited while the engine loads.
            timeout_s: as of `EngineSupervisor`.
            on_part: as of `EngineProcess.ready`.

        Raises:
            ConfigError: the settings or the checkpoint cannot be served.
            EngineDeadError: the process died while loading.
            Exception: what awaiting `text` raises.
        """
        async with EngineProcess.starting(config) as engine:
            vocabulary, defaults = await text
            info = await engine.ready(on_part=on_part)
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
        """Why there will be no engine any more; empty if there may be."""
        return self._supervisor.death

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    @property
    def num_stuck(self) -> int:
        """Number of engines killed because they did not answer."""
        return self._supervisor.num_stuck

    @property
    def problem(self) -> str:
        """Why the engine may soon be restarted; empty if nothing is wrong."""
        return "the engine process does not answer" if self._supervisor.is_suspect else ""

    @property
    def pids(self) -> dict[str, int]:
        """The running process's pid, as "engine"; empty if there is none."""
        pid = self._supervisor.engine_pid
        return {} if pid is None else {"engine": pid}

    def reconfigure(self, scheduler: SchedulerConfig) -> None:
        """See `Engine.reconfigure`."""
        resolved = self.settings.resolve(scheduler)
        self._supervisor.check_running()
        self.settings.change(scheduler, resolved)

    def forget_cache(self) -> None:
        """See `Engine.forget_cache`."""
        self._supervisor.check_running()
        self._supervisor.send(ForgetCache())

    def watch_cache(self, tell: Callable[[Sequence[KVEvent]], object]) -> None:
        """Subscribe to cache events, for good.

        Args:
            tell: called with events that belong together, in order. The first is an
                `AllBlocksCleared`; another may come at any time, followed by all cached blocks.
        """
        self._cache_watchers.append(tell)
        self._supervisor.send(WatchCache())

    @property
    def unfinished(self) -> list[RequestSent]:
        """Requests that have come and not ended, in the order in which they came."""
        return [sent(one.request) for one in self._submissions]

    def kept(self) -> dict[str, KeptPromise]:
        """Return the promises on gaps between tokens and what was delivered; key the class."""
        return self._deliveries.kept()

    def check_running(self) -> None:
        """Raises `EngineDeadError` if there is no engine at the moment."""
        self._supervisor.check_running()

    def submitted(
        self, requests: Iterable[AddRequest], take: Take
    ) -> AbstractAsyncContextManager[Submission]:
        """See `Engine.submitted`."""
        return self._submissions.submitted(requests, take)

    async def close(self, *, at_once: bool = False) -> None:
        """End the engine process; unfinished requests are lost.

        Args:
            at_once: do not wait for the end of its step.
        """
        await self._supervisor.close(at_once=at_once)

    def _send(self, request: AddRequest) -> None:
        self._supervisor.send(request)
        self.activity.note_sent(request)

    def _abort(self, request_id: str) -> None:
        self._supervisor.send(AbortRequest(request_id=request_id))
        if self._supervisor.engine_pid is None:
            self.stats = EngineStats(num_waiting=len(self._submissions))

    def _set_recording(self, is_on: bool) -> None:
        self._supervisor.send(SetRecording(is_on))

    def _set_announcing(self, is_on: bool) -> None:
        self._supervisor.send(SetAnnouncing(is_on))

    # `EngineListener`: called by the supervisor.

    @property
    def num_unfinished(self) -> int:
        return len(self._submissions)

    def engine_is_ready(self, info: EngineInfo) -> None:
        """Set a new engine up, and send it the unfinished requests, oldest first."""
        self.tickets = Tickets(self._supervisor.config.transfer, info.transfer)
        if self.vocabulary.num_ids:  # a caller may have no tokenizer
            self._supervisor.send(SetVocabulary(self.vocabulary))
        if self.activity.records.is_wanted:
            self._set_recording(True)
        if self.activity.live.is_wanted:
            self._set_announcing(True)
        if self._cache_watchers:
            self._supervisor.send(WatchCache())
        for one in self._submissions:
            self._supervisor.send(one.request)

    def note_begun(self, step: StepBegun) -> None:
        """Publish that a step begins."""
        self.activity.note_begun(step)

    def take_step(self, step: StepOutputs) -> None:
        """Deliver all outputs of a step in one pass."""
        now_s = time.monotonic()
        self.stats = step.stats
        with _only_logged():
            self.activity.note(step.records, now_s)
        with _only_logged():
            self._tell_of_cache(step.kv_events)
        given = self._submissions.take(step.outputs, now_s)
        self._note_delivery(step.records, given)

    def _tell_of_cache(self, events: Sequence[KVEvent]) -> None:
        if events:
            for tell in self._cache_watchers:
                tell(events)

    def _note_delivery(self, records: Sequence[EngineRecord], given: Sequence[Unfinished]) -> None:
        """Measure deliveries after all tokens of the step have been written."""
        now_s = time.monotonic()
        step = next((record for record in records if isinstance(record, StepRecord)), None)
        if step is not None:
            self._submissions.note(given, lambda stream: self._deliveries.note(stream, now_s))
            is_mixed = step.num_prefill_tokens > 0 and step.num_decode_tokens > 0
            self._deliveries.end_step(step.ended_s, now_s, is_mixed=is_mixed)

    def engine_died(self, retry_after_s: float) -> None:
        """End requests that have begun, and those during which an engine died before.

        Such a request may be the cause.
        """
        message = "the engine process died while it held this request"
        for one in self._submissions:
            if one.has_begun or one.request.is_rerun:
                self._submissions.fail(one, EngineDeadError(message, retry_after_s=retry_after_s))
            one.request = msgspec.structs.replace(one.request, is_rerun=True)
        self.stats = EngineStats(num_waiting=len(self._submissions))
        self.activity.recent.clear()
        self._tell_of_cache([AllBlocksCleared()])

    def engine_is_given_up(self, reason: str) -> None:
        """End all requests."""
        for one in self._submissions:
            self._submissions.fail(one, EngineDeadError(f"the engine is gone: {reason}"))


@contextmanager
def _only_logged() -> Iterator[None]:
    """Log errors of watchers, which must not keep tokens from their streams."""
    try:
        yield
    except Exception:
        logger.exception("a step cannot be told to all who watch")
