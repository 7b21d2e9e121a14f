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
from legato.core.outputs import RequestOutput
from legato.core.plan import BlockMove, Fault, StepPlan, StepResult
from legato.core.replica_state import ReplicaState
from legato.core.request import Event
from legato.core.stats import EngineStats
from legato.core.step_record import EngineRecord, StepBegun
from legato.engine.calibration.recalibration import Recalibration
from legato.engine.errors import EngineFaultError
from legato.engine.loop.grammars import Grammars
from legato.engine.loop.intake import Intake
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
_MOST_FAILURES = 64
"""Most errors of parts of steps in a row after which the engine goes on."""
_MOST_STALLS = 1000
"""Most plans in a row without a chunk, with nothing in flight, after which the engine goes on."""
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
        containment: the scheduler's, for all parts of the engine.
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
        self.containment = scheduler.containment
        self._kv = kv
        self._executor = executor
        self._in_flight: deque[_Flight] = deque()
        self._unmoved: tuple[BlockMove, ...] = ()  # copies to make again, since they failed
        self._num_failures = 0  # of parts of steps, since a step has landed
        self._num_stalls = 0  # plans in a row without a chunk, when nothing was in flight
        self._stats = EngineStats()
        self._next_config: SchedulerConfig | None = None
        self._forgets = False
        self._num_failed_steps = 0
        self._recorder = Recorder(is_on=False)
        self._intake = Intake(scheduler, self.grammars, transfers, self._recorder)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything; False while all requests wait for fetched blocks."""
        return self.containment.value("the look for work", self._looks_for_work, otherwise=True)

    def _looks_for_work(self) -> bool:
        has_news = self.transfers is not None and self.transfers.has_news
        has_ready = self.grammars.unfinished and self.grammars.has_ready
        if has_news or has_ready or self._kv.has_untold_blocks:
            return True
        return self._scheduler.has_work and not self._waits_for_blocks

    @property
    def idle_s(self) -> float | None:
        """Seconds for which only a message brings work; None for no limit."""
        return self.containment.value("the look for idle time", self._wait_s, otherwise=_WAIT_S)

    def _wait_s(self) -> float | None:
        has_more = self._untaken is not None and self._untaken.has_more
        if self.has_work or has_more or self.grammars.is_compiling:
            return 0.0
        if self.transfers is not None and self.transfers.is_waiting:
            return _WAIT_S if self._waits_for_blocks else _TRANSFERS_LOOK_S
        return None if self._recalibration is None else self._recalibration.wait_s

    def close(self) -> None:
        """Keep on disk what later runs need; call it after the last step."""
        with self.containment.containing("the work at the end"):
            self._at_end()

    def use_idle_time(self) -> None:
        """Do a little work that can wait; call it without work and without messages."""
        with self.containment.containing("the work of idle time"):
            self._use_idle_time()

    def _use_idle_time(self) -> None:
        if self.grammars.is_compiling:
            self.grammars.wait(_WAIT_S)
            return
        if self._untaken is not None and self._untaken.has_more:
            self._untaken.take_slice()
        elif self._recalibration is not None and not self._waits_for_blocks:
            self._recalibrate(self._recalibration.go_on)

    def _recalibrate(self, act: Callable[[], None]) -> None:
        assert self._recalibration is not None
        end = self._recalibration.abandon
        with self.containment.containing("the measuring of step times", end):
            act()

    @property
    def stats(self) -> EngineStats:
        """Counters of the scheduler, the cache and the loop; the last ones if one raises."""
        stats = self.containment.value("the statistics", self._count, None)
        if stats is None:
            num_errors = self.containment.num_errors
            stats = msgspec.structs.replace(self._stats, num_contained_errors=num_errors)
        self._stats = stats
        return stats

    def _count(self) -> EngineStats:
        return EngineStats(
            **msgspec.structs.asdict(self._scheduler.stats),
            num_failed_steps=self._num_failed_steps,
            num_contained_errors=self.containment.num_errors,
            kv_usage=self._kv.usage,
            num_cached_blocks=self._kv.num_cached_blocks,
            num_state_checkpoints=self._kv.num_checkpoints,
            window_usage=self._kv.window_usage,
            transfer=None if self.transfers is None else self.transfers.stats,
        )

    @property
    def state(self) -> ReplicaState | None:
        """See `Scheduler.state`; None if it raised."""
        ask = self._scheduler.state
        return self.containment.value("the state", lambda: ask(self._clock()), otherwise=None)

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Change the settings once no step is in flight; see `Scheduler.reconfigure`.

        If that raises, the settings of before stay.
        """
        self._next_config = config
        self._take_settings()

    def forget_cache(self) -> None:
        """Forget all cached blocks that no request uses, once no step is in flight."""
        self._forgets = True

    def record_delivery(self, delay_change_s: float) -> None:
        """See `Scheduler.record_delivery`."""
        with self.containment.containing("learning of deliveries"):
            self._scheduler.record_delivery(delay_change_s)

    def announce_steps(self, announce: Callable[[StepBegun], None] | None) -> None:
        """Call `announce` before each step is computed; None ends it."""
        self._announce = announce

    def set_recording(self, *, is_on: bool) -> None:
        """Start or stop to keep all records; records that were not taken are dropped."""
        with self.containment.containing("the start of a record"):
            self._recorder.restart(is_on=is_on)

    def take_records(self) -> list[EngineRecord]:
        """Return the records since the last call; without recording, only the latest step's."""
        return self.containment.value("the taking of records", self._recorder.take, otherwise=[])

    def watch_cache(self) -> None:
        """See `KVCacheManager.watch`."""
        with self.containment.containing("the watch of the cache"):
            self._kv.watch()

    def take_kv_events(self) -> list[KVEvent]:
        """Return the changes of cached blocks since the last call, if the cache is watched."""
        return self.containment.value("the watch of the cache", self._kv.take_events, otherwise=[])

    def fail(self, request_id: str, error: Exception) -> RequestOutput:
        """See `Scheduler.fail`; counts and logs the error."""
        self.containment.note(f"the delivery of {request_id}", error)
        output = self._scheduler.fail(request_id, error)
        self._intake.note([output], self._clock())
        return output

    def apply(self, events: Sequence[Event]) -> list[RequestOutput]:
        """Take `events`; return the ends that are known without a step."""
        return self._intake.take(events, self._clock())

    def step(self, events: Sequence[Event] = ()) -> list[RequestOutput]:
        """Take `events`, keep the executor busy, and return the oldest step's outputs.

        An error of one request's bookkeeping ends that request. An error of a step's bookkeeping
        lets the steps in flight land; then the scheduler restores its state and plans again. An
        error of anything else, as of records or settings, leaves it undone.

        Raises:
            EngineFaultError: the executor computes nothing any more, or no step can be planned. The
                step's requests ended, and their outputs are lost; other requests are unchanged.
        """
        if self._recalibration is not None:
            self._recalibrate(self._recalibration.postpone)
        outputs = self.apply(events)
        for stage in (self._fill, self._wait, self._land):
            outputs += self._contained("a step", stage)
        return outputs + self._intake.end_lost(self._clock())

    def _contained(self, what: str, act: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        """Do a part of a step; what it raises has the next step planned again.

        Raises `EngineFaultError` if that goes on and no step lands.
        """
        try:
            return act()
        except EngineFaultError:
            raise
        except Exception as error:
            self.containment.note(what, error)
            self._scheduler.replanning.require(error)
            self._num_failures += 1
            if self._num_failures > _MOST_FAILURES:
                raise EngineFaultError(f"{what} fails again and again: {error!r}") from error
            return []

    def _take_settings(self) -> None:
        config = self._next_config
        if config is not None and not self._in_flight:
            self._next_config = None
            with self.containment.containing("the change of settings"):
                self._scheduler.reconfigure(config, self._clock())

    def _fill(self) -> list[RequestOutput]:
        """Submit steps until as many are in flight as the executor takes."""
        outputs: list[RequestOutput] = []
        self._take_settings()
        if self._forgets and not self._in_flight:
            self._forgets = False
            with self.containment.containing("the forgetting of the cache"):
                self._kv.forget()
        while self._takes_another:
            planned_s = self._clock()
            plan = self._plan(planned_s, outputs)
            with self.containment.containing("the announcement of a step"):
                self._announce_step(plan, planned_s)
            if plan is None:
                self._begin_transfers_alone()
                self._note_stall()
                break
            self._num_stalls = 0
            started_s = self._clock()
            fault = begin(self._executor, plan, partial(self._begin_transfers, plan.moves))
            self._in_flight.append(_Flight(plan, planned_s, started_s, fault))
            with self.containment.containing("the record of a turnaround"):
                self._note_turnaround()
        return outputs

    def _note_stall(self) -> None:
        """Raise if no request can begin any more, since blocks were lost in an error."""
        is_waiting = self.transfers is not None and self.transfers.is_waiting
        if self._in_flight or is_waiting or not self._scheduler.has_work:
            return
        self._num_stalls += bool(self.containment.num_errors)
        if self._num_stalls > _MOST_STALLS:
            raise EngineFaultError("no request can begin, though none runs; see earlier errors")

    def _plan(self, now_s: float, outputs: list[RequestOutput]) -> StepPlan | None:
        """Plan a step; add the outputs of requests that end because they cannot be planned."""
        replanning = self._scheduler.replanning
        if not replanning.is_due:
            try:
                return self._scheduler.plan(now_s)
            except Exception as error:
                self.containment.note("the plan of a step", error)
                replanning.require(error)
        if self._in_flight:
            return None
        try:
            again = replanning.plan_again(now_s)
        except Exception as error:
            raise EngineFaultError(f"no step can be planned any more: {error!r}") from error
        self._unmoved += again.moves
        self._intake.note(again.outputs, now_s)
        outputs += again.outputs
        return again.plan

    def _announce_step(self, plan: StepPlan | None, planned_s: float) -> None:
        self._tell_of_broken_promise()
        if plan is None:
            return
        if self._announce is not None:
            self._announce(begun(plan, planned_s))
        flights = (flight.plan.predicted_s or 0.0 for flight in self._in_flight)
        if (predicted_s := sum(flights, plan.predicted_s or 0.0)) > _LONG_S:
            self.note_long_step(predicted_s)

    def _wait(self) -> list[RequestOutput]:
        """Note whether only blocks are waited for, and wait for grammars if nothing else is."""
        is_waiting = self.transfers is not None and self.transfers.is_waiting
        self._waits_for_blocks = is_waiting and self._scheduler.has_work and not self._in_flight
        if self.grammars.unfinished and not self._in_flight and self.grammars.is_compiling:
            self.grammars.wait(_WAIT_S)
        return []

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
        if self._scheduler.replanning.is_due:
            return  # the failed plan has taken copies that come first
        moves = self.containment.value("the copies of blocks", self._kv.take_moves, otherwise=())
        try:
            self._begin_transfers(moves)
        except Exception as error:
            if not self._in_flight or is_device_lost(error):
                raise EngineFaultError(f"blocks cannot be copied any more: {error}") from error
            logger.warning("copies of blocks failed and are made again: %r", error)

    @property
    def _takes_another(self) -> bool:
        """Whether another step may be submitted; not before a failed `submit` is recovered."""
        if len(self._in_flight) == self._executor.depth or self._next_config is not None:
            return False
        if self._forgets or (self._scheduler.replanning.is_due and self._in_flight):
            return False
        return not self._in_flight or self._in_flight[-1].fault is None

    def _land(self) -> list[RequestOutput]:
        """Wait for the oldest step in flight, if there is one, and commit it."""
        if not self._in_flight:
            return []
        flight = self._in_flight.popleft()
        result = flight.fault or collect(self._executor, flight.plan)
        if isinstance(result, Fault):
            return self._recover(flight, result)
        return self._commit(flight, result)

    def _commit(self, flight: _Flight, result: StepResult) -> list[RequestOutput]:
        now_s = self._clock()
        self._landed_s = now_s if self._in_flight else None
        times_s = flight.planned_s, flight.started_s, now_s
        with self.containment.containing("the record of a step"):
            self._recorder.note_step(flight.plan, result, times_s, self._scheduler, self._kv)
        outputs = self._take_result(flight.plan, result, now_s)
        if self.transfers is not None:
            with self.containment.containing("the offer of blocks"):
                self.transfers.publish()
        self._intake.note(outputs, now_s)
        self._num_failures = 0
        return outputs

    def _take_result(self, plan: StepPlan, result: StepResult, now_s: float) -> list[RequestOutput]:
        """Commit a result, at the second attempt if the first raises; else end its requests."""
        try:
            return self._scheduler.commit(result, now_s)
        except Exception as error:
            self.containment.note("the commit of a step", error)
            self._scheduler.replanning.require(error)
        try:
            return self._scheduler.commit(result, now_s)
        except Exception as error:
            self.containment.note("the commit of a step", error)
            return self._intake.fail([chunk.request_id for chunk in plan.chunks], error)

    def _recover(self, flight: _Flight, fault: Fault) -> list[RequestOutput]:
        """End the requests that made a step fail, and no others.

        The steps after it failed, too, and are planned again.
        """
        self._num_failed_steps += 1
        outputs: list[RequestOutput] = []
        while self._in_flight:
            self._in_flight.pop()
            outputs += self._contained("the withdrawal of a step", self._scheduler.withdraw)
        self._intake.note(outputs, self._clock())
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
