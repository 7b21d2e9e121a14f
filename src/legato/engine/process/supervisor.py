"""Keeps an engine process running: starts another if it dies or hangs."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.outputs import FinishReason
from legato.core.replica_state import ReplicaState
from legato.core.request import AbortRequest, Event
from legato.core.stats import EngineStats
from legato.core.step_record import EngineRecord, RequestEnded, StepBegun
from legato.engine.errors import EngineDeadError
from legato.engine.process.channel import Ping
from legato.engine.process.engine_messages import (
    Control,
    EngineInfo,
    GetState,
    LongStepBegins,
    Reconfigure,
    SetRecording,
    StateReport,
    StepAnnounced,
    StepOutputs,
)
from legato.engine.process.engine_process import EngineProcess
from legato.engine.process.pulse import TICK_S, Pulse

logger = logging.getLogger(__name__)

_SHORT_LIFE_S = 60.0
_MAX_SHORT_LIVES = 3
_LEAST_WAIT_S = 1.0


class EngineListener(Protocol):
    """Receives a supervisor's news of its engine, on the event loop."""

    def engine_is_ready(self, info: EngineInfo) -> None:
        """Take a new engine, to which nothing was sent yet."""

    def note_begun(self, step: StepBegun) -> None:
        """Take the announcement of a step, if announcements are on."""

    def take_step(self, step: StepOutputs) -> None:
        """Take the outputs of a step."""

    def engine_died(self, retry_after_s: float) -> None:
        """Note that the engine is gone, and that another is expected to serve by then."""

    def engine_is_given_up(self, reason: str) -> None:
        """Note that there will be no other engine; the last call."""


class EngineSupervisor:
    """Runs one engine process at a time, until it is closed or restarts do not help.

    Args:
        engine: the first engine, which is ready.
        timeout_s: how long an engine may compute without an answer, at least; a step that is
            predicted to take long may take ten times that prediction.
        program: as in `EngineProcess.starting`.

    Attributes:
        config: the configuration of the next engine.
        num_stuck: engines that were killed because they did not answer.
        is_alive: whether there is an engine, or will be again.
        death: why there will be no engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine: EngineProcess,
        listener: EngineListener,
        *,
        timeout_s: float,
        program: Sequence[str] | None = None,
    ) -> None:
        self.config = config
        self.num_stuck = 0
        self._program = program
        self.is_alive = True
        self.death = ""
        self._listener = listener
        self._timeout_s = timeout_s
        self._engine: EngineProcess | None = engine  # None between two engines
        self._stats = EngineStats()  # as the engine counted after its latest step
        self._is_recording = False
        self._pulse = self._pulse_of(engine)
        self._restarts = Restarts(engine.loading_s)
        self._asking: list[asyncio.Future[ReplicaState]] = []
        self._running = asyncio.create_task(self._keep_running(engine))

    @property
    def num_restarts(self) -> int:
        return self._restarts.count

    @property
    def is_suspect(self) -> bool:
        """Whether the engine may be stuck; it is killed soon."""
        return self._engine is not None and self._pulse.is_suspect

    @property
    def engine_pid(self) -> int | None:
        return None if self._engine is None else self._engine.pid

    def check_running(self) -> None:
        """Raises `EngineDeadError` if there is no engine just now."""
        if not self.is_alive:
            raise EngineDeadError(f"the engine is gone: {self.death}")
        if self._engine is None:
            raise EngineDeadError(
                "the engine process died and is being restarted",
                retry_after_s=self._restarts.seconds_left,
            )

    def send(self, message: Event | Control) -> None:
        """Send a message; do nothing if there is no engine just now."""
        if self._engine is None:
            return
        if isinstance(message, SetRecording):
            self._is_recording = message.is_on
        if not self._engine.send(message):  # no step of the engine would report its end
            assert isinstance(message, AbortRequest)
            records: list[EngineRecord] = []
            if self._is_recording:
                records = [_aborted(message.request_id)]
            self._pass_on(self._engine, StepOutputs([], self._stats, records))

    def reconfigure(self, resolved: SchedulerConfig) -> None:
        """Change the settings of this engine and of later ones.

        Args:
            resolved: settings in which every "auto" is replaced.
        """
        self.config = msgspec.structs.replace(self.config, scheduler=resolved)
        self.send(Reconfigure(resolved))

    async def state(self) -> ReplicaState:
        """Return the engine's state; raises `EngineDeadError` if there is no engine."""
        self.check_running()
        answer: asyncio.Future[ReplicaState] = asyncio.get_running_loop().create_future()
        if not self._asking:  # one answer serves all callers
            self.send(GetState())
        self._asking.append(answer)
        return await answer

    async def close(self, *, at_once: bool = False) -> None:
        """End the engine process, and lose its running requests.

        Args:
            at_once: do not wait for the end of its step.
        """
        if at_once and self._engine is not None:
            self._engine.abandon()
        if self.is_alive:
            self._running.cancel()
            self._give_up("it was stopped")
        await asyncio.wait([self._running])
        if self._engine is not None:  # the task was cancelled before it started
            await self._engine.close()

    async def _keep_running(self, engine: EngineProcess) -> None:
        try:
            while True:
                await self._follow(engine)
                self._restarts.note_death()
                self._listener.engine_died(self._restarts.seconds_left)
                engine = await self._start_again()
        except (ConfigError, EngineDeadError) as error:
            self._give_up(str(error))
        except Exception as error:
            logger.exception("cannot go on")
            self._give_up(f"{type(error).__name__}: {error}")

    async def _follow(self, engine: EngineProcess) -> None:
        """Pass on the engine's messages until it ends."""
        self._engine = engine
        self._stats, self._is_recording = EngineStats(), False
        self._listener.engine_is_ready(engine.info)
        self._pulse = self._pulse_of(engine)
        watching = asyncio.create_task(self._end_if_it_is_stuck(engine))
        try:
            async for step in engine.steps():
                self._pulse.note_answer()
                match step:
                    case LongStepBegins(predicted_s):
                        self._pulse.note_step(predicted_s)
                    case StepAnnounced(begun):
                        self._listener.note_begun(begun)
                    case StateReport(state):
                        self._tell(state or EngineDeadError("the engine cannot tell its state"))
                    case StepOutputs():
                        self._stats = step.stats
                        self._pass_on(engine, step)
        finally:
            watching.cancel()
            self._engine = None
            self._tell(EngineDeadError("the engine process died when it was asked"))
            status = await engine.close()
        logger.error("the engine process ended unexpectedly: %s", status)

    def _pass_on(self, engine: EngineProcess, step: StepOutputs) -> None:
        """Pass on the outputs of a step; requests that wait to be sent count as waiting."""
        num_waiting = step.stats.num_waiting + engine.num_pending
        stats = msgspec.structs.replace(step.stats, num_waiting=num_waiting)
        self._listener.take_step(msgspec.structs.replace(step, stats=stats))

    def _tell(self, answer: ReplicaState | EngineDeadError) -> None:
        """Answer all callers of `state`."""
        asking, self._asking = self._asking, []
        for one in asking:
            if one.done():  # the caller waits no longer
                continue
            if isinstance(answer, EngineDeadError):
                one.set_exception(answer)
            else:
                one.set_result(answer)

    def _pulse_of(self, engine: EngineProcess) -> Pulse:
        return Pulse(engine.pid, max_unanswered=self._timeout_s / TICK_S)

    async def _end_if_it_is_stuck(self, engine: EngineProcess) -> None:
        """Kill an engine that does not answer, whether or not requests wait for it."""
        while not self._pulse.is_stuck:
            await asyncio.sleep(TICK_S)
            engine.send(Ping())
            self._pulse.tick()
        logger.error("the engine process %s: it is killed", self._pulse.complaint)
        self.num_stuck += 1
        engine.abandon()

    async def _start_again(self) -> EngineProcess:
        """Start another engine; raises like `EngineProcess.ready` if restarts do not help."""
        while True:
            logger.info("starting the engine again")
            try:
                async with EngineProcess.starting(self.config, self._program) as engine:
                    await engine.ready(self._restarts.loading_s)
            except EngineDeadError as error:
                logger.error("%s", error)
                self._restarts.note_death()
            except OSError as error:  # no free descriptors, or no process
                logger.error("the engine cannot be started: %s", error)
                await asyncio.sleep(_LEAST_WAIT_S)
            else:
                self._restarts.note_ready()
                return engine

    def _give_up(self, reason: str) -> None:
        self.is_alive = False
        self.death = reason
        self._listener.engine_is_given_up(reason)


def _aborted(request_id: str) -> RequestEnded:
    """Return the record of a request that was aborted before it was sent to the engine."""
    return RequestEnded(
        request_id=request_id,
        ended_s=time.monotonic(),
        finish_reason=FinishReason.ABORT,
        num_output_tokens=0,
        num_cached_tokens=0,
        error=None,
    )


class Restarts:
    """Counts the deaths of engines, and judges whether another start helps.

    An engine's life is the time that it served, so that a loop is found even if loading is slow.

    Args:
        loading_s: how long the first start took.
        clock: returns seconds.

    Attributes:
        count: number of restarts, failed ones included.
        loading_s: as in the arguments.
    """

    def __init__(self, loading_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self.loading_s = loading_s
        self._clock = clock
        self._num_short_lives = 0  # in a row
        self._died_s = 0.0
        self._ready_s: float | None = clock()  # None while an engine loads

    @property
    def seconds_left(self) -> float:
        """Seconds until the engine that is starting should serve."""
        return max(_LEAST_WAIT_S, self._died_s + self.loading_s - self._clock())

    def note_ready(self) -> None:
        """Note that the engine serves."""
        self._ready_s = self._clock()

    def note_death(self) -> None:
        """Note that the engine died.

        Raises:
            EngineDeadError: restarts do not help: engines die as soon as they serve, or before.
        """
        self._died_s = self._clock()
        served_s = 0.0 if self._ready_s is None else self._died_s - self._ready_s
        self._ready_s = None
        self._num_short_lives = self._num_short_lives + 1 if served_s < _SHORT_LIFE_S else 0
        if self._num_short_lives == _MAX_SHORT_LIVES:
            raise EngineDeadError(
                f"the engine process died {_MAX_SHORT_LIVES} times in a row, each time within "
                f"{_SHORT_LIFE_S:.0f} s of serving"
            )
        self.count += 1
