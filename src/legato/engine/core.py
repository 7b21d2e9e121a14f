"""The engine's loop: apply, plan, execute, commit."""

import logging
import math
import time
from collections.abc import Callable, Iterable

import msgspec

from legato.core.outputs import RequestOutput
from legato.core.request import Event
from legato.engine.messages import EngineStats
from legato.executor.base import Executor
from legato.kv.manager import KVCacheManager
from legato.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_WARN_EVERY_S = 10.0


class EngineCore:
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

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def stats(self) -> EngineStats:
        return EngineStats(**msgspec.structs.asdict(self._scheduler.stats), kv_usage=self._kv.usage)

    def apply(self, events: Iterable[Event]) -> list[RequestOutput]:
        """Take in `events`; returns the ends that are known without a step."""
        return self._scheduler.apply(events, self._clock())

    def step(self, events: Iterable[Event] = ()) -> list[RequestOutput]:
        """Take in `events`, run one step if there is work, and return what it brought."""
        outputs = self.apply(events)
        plan = self._scheduler.plan(self._clock())
        self._tell_of_broken_promise()
        if plan is None:
            return outputs
        try:
            self._executor.submit(plan)
            result = self._executor.collect()
        except Exception as error:
            logger.exception("step %d failed", plan.step_id)
            return outputs + self._scheduler.fail(plan, f"{type(error).__name__}: {error}")
        return outputs + self._scheduler.commit(plan, result, self._clock())

    def _tell_of_broken_promise(self) -> None:
        reason, now_s = self._scheduler.broken_promise, self._clock()
        if reason and now_s - self._told_s > _WARN_EVERY_S:
            self._told_s = now_s
            logger.warning("an SLO cannot be kept: %s", reason)
