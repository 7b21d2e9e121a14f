"""The engine's loop: apply, plan, execute, commit."""

import logging
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.outputs import RequestOutput
from legato.core.plan import Fault, StepPlan, StepResult
from legato.core.request import Event
from legato.core.step_record import EngineRecord
from legato.engine.errors import EngineFaultError
from legato.engine.loop.recorder import Recorder
from legato.engine.loop.recovery import attempt, is_sound, run_in_parts
from legato.engine.process.messages import EngineStats, StepStats
from legato.executor.base import Executor
from legato.kv.manager import KVCacheManager
from legato.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_WARN_EVERY_S = 10.0


class EngineLoop:
    """One scheduler, its cache and one executor, moved forward a step at a time.

    Args:
        clock: seconds, as in `AddRequest.arrival_time_s`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCacheManager,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._told_s = -math.inf
        self._scheduler = scheduler
        self._kv = kv
        self._executor = executor
        self._num_failed_steps = 0
        self._recorder: Recorder | None = None
        self._planned_s = self._started_s = 0.0
        self._step: StepStats | None = None

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            **msgspec.structs.asdict(self._scheduler.stats),
            num_failed_steps=self._num_failed_steps,
            kv_usage=self._kv.usage,
            num_cached_blocks=self._kv.num_cached_blocks,
            step=self._step,
        )

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Plan by other settings from the next step on; see `Scheduler.reconfigure`."""
        self._scheduler.reconfigure(config, self._clock())

    def set_recording(self, *, is_on: bool) -> None:
        """Begin or stop to make records; what has not been taken by then is dropped."""
        self._recorder = Recorder() if is_on else None

    def take_records(self) -> list[EngineRecord]:
        """What happened since the last time, while records are made."""
        return [] if self._recorder is None else self._recorder.take()

    def apply(self, events: Sequence[Event]) -> list[RequestOutput]:
        """Take in `events`; returns the ends that are known without a step."""
        now_s = self._clock()
        outputs = self._scheduler.apply(events, now_s)
        if self._recorder is not None:
            self._recorder.note_events(events, now_s)
            self._recorder.note_outputs(outputs, now_s)
        return outputs

    def step(self, events: Sequence[Event] = ()) -> list[RequestOutput]:
        """Take in `events`, run one step if there is work, and return what it brought.

        Raises:
            EngineFaultError: nothing can be computed any more. The step's requests have ended, and
                what is told of them is lost; all others are as before.
        """
        self._step = None
        outputs = self.apply(events)
        self._planned_s = self._clock()
        plan = self._scheduler.plan(self._planned_s)
        self._tell_of_broken_promise()
        if plan is None:
            return outputs
        self._started_s = self._clock()
        if plan.moves:
            self._executor.move(plan.moves)
        result = attempt(self._executor, plan)
        if isinstance(result, Fault):
            return outputs + self._recover(plan, result)
        return outputs + self._commit(plan, result)

    def _commit(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        now_s = self._clock()
        self._step = _step_stats(plan, result, now_s - self._planned_s)
        if self._recorder is not None:
            times_s = self._planned_s, self._started_s, now_s
            self._recorder.note_step(plan, result, times_s, self._scheduler.stats, self._kv)
        outputs = self._scheduler.commit(plan, result, now_s)
        if self._recorder is not None:
            self._recorder.note_outputs(outputs, now_s)
        return outputs

    def _recover(self, plan: StepPlan, fault: Fault) -> list[RequestOutput]:
        """End the requests to blame for a step that failed, and no others."""
        self._num_failed_steps += 1
        result = run_in_parts(self._executor, plan, fault)
        is_hopeless = len(result.faults) == len(plan.chunks) and not is_sound(self._executor, plan)
        outputs = self._commit(plan, result)
        if is_hopeless:
            raise EngineFaultError(f"the engine computes nothing any more: {fault.error}")
        return outputs

    def _tell_of_broken_promise(self) -> None:
        reason, now_s = self._scheduler.broken_promise, self._clock()
        if reason and now_s - self._told_s > _WARN_EVERY_S:
            self._told_s = now_s
            logger.warning("an SLO cannot be kept: %s", reason)


def _step_stats(plan: StepPlan, result: StepResult, seconds: float) -> StepStats:
    prefill = [chunk for chunk in plan.chunks if chunk.ended_by != "decode"]
    is_clean = not (result.faults or result.ran_out_of_memory)
    return StepStats(
        num_prefill_tokens=sum(chunk.num_tokens for chunk in prefill),
        num_decode_tokens=len(plan.chunks) - len(prefill),
        prefill_ended_by=tuple(chunk.ended_by for chunk in prefill),
        seconds=seconds,
        predicted_s=plan.predicted_s if is_clean else None,
    )
