"""The engine's loop: apply, plan, execute, commit."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.kv_events import KVEvent
from legato.core.kv_transfer import BlocksArrived
from legato.core.outputs import RequestOutput
from legato.core.plan import BlockMove, Fault, StepPlan, StepResult
from legato.core.replica_state import ReplicaState
from legato.core.request import AddRequest, Event
from legato.core.stats import EngineStats
from legato.core.step_record import EngineRecord, StepBegun
from legato.engine.calibration.recalibration import Recalibration
from legato.engine.errors import EngineFaultError
from legato.engine.loop.grammars import Grammars
from legato.engine.loop.recorder import Recorder, begun
from legato.engine.loop.recovery import (
    all_failed,
    attempt,
    begin,
    collect,
    is_device_lost,
    is_sound,
    lost_device,
    run_in_parts,
)
from legato.engine.loop.transfers import Transfers
from legato.executor.executor import Executor
from legato.executor.untaken_pages import UntakenPages
from legato.kv.manager import KVCacheManager
from legato.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_WARN_EVERY_S = 10.0
_LONG_S = 1.0
"""Predicted duration from which a step counts as long."""
_WAIT_S = 0.001
"""Longest wait for a grammar, or for blocks, while there is no other work."""
_TRANSFERS_LOOK_S = 0.02
"""How often an idle engine looks for blocks that it need not keep for other engines any more."""


class _Flight(NamedTuple):
    """A submitted step that was not collected yet.

    Attributes:
        planned_s, started_s: as in `StepRecord`.
        fault: the error that its copies or `submit` raised; None without one.
    """

    plan: StepPlan
    planned_s: float
    started_s: float
    fault: Fault | None


def _needs_grammar(event: Event) -> bool:
    return isinstance(event, AddRequest) and event.params.structured_outputs is not None


class EngineLoop:
    """Runs one scheduler, its cache and one executor, a step at a time.

    As many steps are in flight as the executor takes. With more than one, the next step is planned
    and submitted while a step is computed.

    Args:
        clock: returns seconds, as in `AddRequest.arrival_time_s`.
        untaken: the cache's pages to allocate while idle; None if there are none.
        recalibration: measures step times while idle; None if they are known.
        at_end: called by `close`.

    Attributes:
        grammars: compiles the grammars of outputs, which the executor gets from it.
        transfers: sends and fetches blocks; None without other engines.
        note_long_step: called before a step that should take long, with the predicted seconds
            until it ends, the steps in flight before it included.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCacheManager,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        *,
        grammars: Grammars | None = None,
        untaken: UntakenPages | None = None,
        recalibration: Recalibration | None = None,
        transfers: Transfers | None = None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.grammars = grammars or Grammars()
        self.transfers = transfers
        self.note_long_step: Callable[[float], None] = lambda _: None
        self._untaken = untaken
        self._recalibration = recalibration
        self._at_end = at_end
        self._announce: Callable[[StepBegun], None] | None = None
        self._clock = clock
        self._reported_s = -math.inf
        self._waits_for_blocks = False  # as of the last step
        self._landed_s: float | None = None  # when a step landed while another was in flight
        self._scheduler = scheduler
        self._containment = scheduler.containment
        self._kv = kv
        self._executor = executor
        self._in_flight: deque[_Flight] = deque()
        self._unmoved: tuple[BlockMove, ...] = ()  # copies to make again, since they failed
        self._next_config: SchedulerConfig | None = None
        self._forgets = False
        self._num_failed_steps = 0
        self._recorder = Recorder(is_on=False)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything; False while all requests wait for fetched blocks."""
        has_news = self.transfers is not None and self.transfers.has_news
        has_ready = self.grammars.unfinished and self.grammars.has_ready
        if has_news or has_ready or self._kv.has_untold_blocks:
            return True
        return self._scheduler.has_work and not self._waits_for_blocks

    @property
    def idle_s(self) -> float | None:
        """Seconds for which only a message brings work; None for no limit."""
        has_more = self._untaken is not None and self._untaken.has_more
        if self.has_work or has_more or self.grammars.is_compiling:
            return 0.0
        if self.transfers is not None and self.transfers.is_waiting:
            return _WAIT_S if self._waits_for_blocks else _TRANSFERS_LOOK_S
        return None if self._recalibration is None else self._recalibration.wait_s

    def close(self) -> None:
        """Keep on disk what later runs need; call it after the last step."""
        self._at_end()

    def use_idle_time(self) -> None:
        """Do a little work that can wait; call it without work and without messages."""
        if self.grammars.is_compiling:
            self.grammars.wait(_WAIT_S)
            return
        if self._untaken is not None and self._untaken.has_more:
            self._untaken.take_slice()
        elif self._recalibration is not None and not self._waits_for_blocks:
            self._recalibration.go_on()

    @property
    def stats(self) -> EngineStats:
        """Counters of the scheduler, the cache and the loop."""
        return EngineStats(
            **msgspec.structs.asdict(self._scheduler.stats),
            num_failed_steps=self._num_failed_steps,
            num_contained_errors=self._containment.num_errors,
            kv_usage=self._kv.usage,
            num_cached_blocks=self._kv.num_cached_blocks,
            num_state_checkpoints=self._kv.num_checkpoints,
            window_usage=self._kv.window_usage,
            transfer=None if self.transfers is None else self.transfers.stats,
        )

    @property
    def state(self) -> ReplicaState | None:
        """See `Scheduler.state`; None if it raised."""
        with self._containment.containing("telling the state"):
            return self._scheduler.state(self._clock())
        return None

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Change the settings once no step is in flight; see `Scheduler.reconfigure`."""
        self._next_config = config
        self._take_settings()

    def forget_cache(self) -> None:
        """Forget all cached blocks that no request uses, once no step is in flight."""
        self._forgets = True

    def record_delivery(self, delay_change_s: float) -> None:
        """See `Scheduler.record_delivery`."""
        with self._containment.containing("learning of deliveries"):
            self._scheduler.record_delivery(delay_change_s)

    def announce_steps(self, announce: Callable[[StepBegun], None] | None) -> None:
        """Call `announce` before each step is computed; None ends it."""
        self._announce = announce

    def set_recording(self, *, is_on: bool) -> None:
        """Start or stop to keep all records; records that were not taken are dropped."""
        self._recorder = Recorder(is_on=is_on)

    def take_records(self) -> list[EngineRecord]:
        """Return the records since the last call; without recording, only the latest step's."""
        return self._recorder.take()

    def watch_cache(self) -> None:
        """See `KVCacheManager.watch`."""
        with self._containment.containing("the watch of the cache"):
            self._kv.watch()

    def take_kv_events(self) -> list[KVEvent]:
        """Return the changes of cached blocks since the last call, if the cache is watched."""
        with self._containment.containing("the watch of the cache"):
            return self._kv.take_events()
        return []

    def fail(self, request_id: str, error: Exception) -> RequestOutput:
        """See `Scheduler.fail`; counts and logs the error."""
        self._containment.note(f"the delivery of {request_id}", error)
        output = self._scheduler.fail(request_id, error)
        self._note_outputs([output], self._clock())
        return output

    def apply(self, events: Sequence[Event]) -> list[RequestOutput]:
        """Take `events`; return the ends that are known without a step."""
        now_s = self._clock()
        if self.transfers is not None:
            self.transfers.note_events(events)
            events = [*events, *self.transfers.take_arrived(now_s)]
            self._recorder.note_fetched(self.transfers.take_fetched())
        outputs = self._pass_on([], now_s)  # requests whose grammars are ready
        for event in events:
            outputs += self._take(event, now_s)
        if self.grammars.unfinished:
            self._recorder.note_grammars(self.grammars.take_compile_s(), now_s)
        self._note_outputs(outputs, now_s)
        return outputs

    def _take(self, event: Event, now_s: float) -> list[RequestOutput]:
        try:
            self._recorder.note_events([event], now_s)
            return self._pass_on([event], now_s)
        except Exception as error:
            self._containment.note(f"{type(event).__name__} of {event.request_id}", error)
            if isinstance(event, BlocksArrived):
                return []  # the request may have ended before
            return [self._scheduler.fail(event.request_id, error)]

    def _pass_on(self, events: Sequence[Event], now_s: float) -> list[RequestOutput]:
        passed, outputs = list(events), list[RequestOutput]()
        if self.grammars.unfinished or any(map(_needs_grammar, events)):
            passed, outputs = self.grammars.hold_back(events)
        if self.transfers is not None:
            passed, ended = self.transfers.hold_back(passed)
            outputs += ended
        return outputs + self._scheduler.apply(passed, now_s)

    def step(self, events: Sequence[Event] = ()) -> list[RequestOutput]:
        """Take `events`, keep the executor busy, and return the oldest step's outputs.

        Raises:
            EngineFaultError: the executor computes nothing any more. The step's requests ended, and
                their outputs are lost; other requests are unchanged.
        """
        if self._recalibration is not None:
            self._recalibration.postpone()
        outputs = self.apply(events)
        self._fill()
        is_waiting = self.transfers is not None and self.transfers.is_waiting
        self._waits_for_blocks = is_waiting and self._scheduler.has_work and not self._in_flight
        if not self._in_flight and self.grammars.is_compiling:
            self.grammars.wait(_WAIT_S)
        return outputs + self._land() if self._in_flight else outputs

    def _take_settings(self) -> None:
        if self._next_config is not None and not self._in_flight:
            self._scheduler.reconfigure(self._next_config, self._clock())
            self._next_config = None

    def _fill(self) -> None:
        """Submit steps until as many are in flight as the executor takes."""
        self._take_settings()
        if self._forgets and not self._in_flight:
            self._kv.forget()
            self._forgets = False
        while self._takes_another:
            planned_s = self._clock()
            plan = self._scheduler.plan(planned_s)
            self._tell_of_broken_promise()
            if plan is None:
                self._begin_transfers_alone()
                return
            if self._announce is not None:
                self._announce(begun(plan, planned_s))
            flights = (flight.plan.predicted_s or 0.0 for flight in self._in_flight)
            if (predicted_s := sum(flights, plan.predicted_s or 0.0)) > _LONG_S:
                self.note_long_step(predicted_s)
            started_s = self._clock()
            fault = begin(self._executor, plan, partial(self._begin_transfers, plan.moves))
            self._note_turnaround()
            self._in_flight.append(_Flight(plan, planned_s, started_s, fault))

    def _note_turnaround(self) -> None:
        """Measure how long the device would have waited without another step in flight."""
        if self._landed_s is not None:
            self._scheduler.record_turnaround(self._clock() - self._landed_s)
            self._landed_s = None

    def _begin_transfers(self, moves: Sequence[BlockMove]) -> None:
        """Make copies of blocks, and then begin transfers, which may write to the copied blocks.

        Raises like `Executor.move`; then the next call makes these copies first.
        """
        self._unmoved = (*self._unmoved, *moves)
        if self._unmoved:
            self._executor.move(self._unmoved)
            self._unmoved = ()
        if self.transfers is not None:
            self.transfers.begin(self._clock())

    def _begin_transfers_alone(self) -> None:
        """Begin transfers without a step; copies that fail wait for the steps in flight."""
        try:
            self._begin_transfers(self._kv.take_moves())
        except Exception as error:
            if not self._in_flight or is_device_lost(error):
                raise EngineFaultError(f"blocks cannot be copied any more: {error}") from error
            logger.warning("copies of blocks failed and are made again: %r", error)

    @property
    def _takes_another(self) -> bool:
        """Whether another step may be submitted; not before a failed `submit` is recovered."""
        if len(self._in_flight) == self._executor.depth or self._next_config is not None:
            return False
        if self._forgets:
            return False
        return not self._in_flight or self._in_flight[-1].fault is None

    def _land(self) -> list[RequestOutput]:
        """Wait for the oldest step in flight, and commit it."""
        flight = self._in_flight.popleft()
        result = flight.fault or collect(self._executor, flight.plan)
        if isinstance(result, Fault):
            return self._recover(flight, result)
        return self._commit(flight, result)

    def _commit(self, flight: _Flight, result: StepResult) -> list[RequestOutput]:
        now_s = self._clock()
        self._landed_s = now_s if self._in_flight else None
        times_s = flight.planned_s, flight.started_s, now_s
        self._recorder.note_step(flight.plan, result, times_s, self._scheduler, self._kv)
        outputs = self._scheduler.commit(result, now_s)
        if self.transfers is not None:
            self.transfers.publish()
        self._note_outputs(outputs, now_s)
        return outputs

    def _note_outputs(self, outputs: Sequence[RequestOutput], now_s: float) -> None:
        with self._containment.containing("the record of outputs"):
            self._recorder.note_outputs(outputs, now_s)
        if self.grammars.unfinished:
            with self._containment.containing("the end of grammars"):
                self.grammars.forget(outputs)
        if self.transfers is not None:
            with self._containment.containing("the end of transfers"):
                self.transfers.note_ends(outputs)

    def _recover(self, flight: _Flight, fault: Fault) -> list[RequestOutput]:
        """End the requests that made a step fail, and no others.

        The steps after it failed, too, and are planned again.
        """
        self._num_failed_steps += 1
        outputs: list[RequestOutput] = []
        while self._in_flight:
            self._in_flight.pop()
            outputs += self._scheduler.withdraw()
        self._note_outputs(outputs, self._clock())
        result = self._run_again(flight.plan, fault)
        last = self._last_fault(flight.plan, fault, result)
        outputs += self._commit(flight, result)
        if last is not None:
            raise EngineFaultError(f"the engine computes nothing any more: {last.error}")
        return outputs

    def _run_again(self, plan: StepPlan, fault: Fault) -> StepResult:
        """Run a failed step in parts, or as a whole if only its copies failed."""
        if self._unmoved and not fault.is_device_lost:
            plan = plan.part(plan.chunks)  # as it is, but for copies that have been made
            result = attempt(self._executor, plan, partial(self._begin_transfers, ()))
            if isinstance(result, StepResult):
                return result
            fault = result
        if self._unmoved:
            return all_failed(plan, fault)
        return run_in_parts(self._executor, plan, fault)

    def _last_fault(self, plan: StepPlan, fault: Fault, result: StepResult) -> Fault | None:
        """Return the fault after which no step can be computed; None if one can."""
        lost = lost_device(result)
        if lost is not None or self._unmoved:
            return lost or fault
        all_fail = len(result.faults) == len(plan.chunks)
        return fault if all_fail and not is_sound(self._executor, plan) else None

    def _tell_of_broken_promise(self) -> None:
        reason, now_s = self._scheduler.broken_promise, self._clock()
        if reason and now_s - self._reported_s > _WARN_EVERY_S:
            self._reported_s = now_s
            logger.warning("an SLO cannot be kept: %s", reason)
