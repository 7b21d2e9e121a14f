"""The engine's loop: apply, plan, execute, commit."""

import logging
from collections.abc import Iterable

from legato.core.outputs import RequestOutput
from legato.core.request import Event
from legato.engine.messages import EngineStats
from legato.executor.base import Executor
from legato.kv.manager import KVCacheManager
from legato.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class EngineCore:
    """One scheduler, its cache and one executor, moved forward a step at a time."""

    def __init__(self, scheduler: Scheduler, kv: KVCacheManager, executor: Executor) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._executor = executor

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def stats(self) -> EngineStats:
        stats = self._scheduler.stats
        return EngineStats(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_preemptions=stats.num_preemptions,
            num_steps_over_budget=stats.num_steps_over_budget,
            kv_usage=self._kv.usage,
        )

    def apply(self, events: Iterable[Event]) -> list[RequestOutput]:
        """Take in `events`; returns the ends that are known without a step."""
        return self._scheduler.apply(events)

    def step(self, events: Iterable[Event] = ()) -> list[RequestOutput]:
        """Take in `events`, run one step if there is work, and return what it brought."""
        outputs = self.apply(events)
        plan = self._scheduler.plan()
        if plan is None:
            return outputs
        try:
            self._executor.submit(plan)
            result = self._executor.collect()
        except Exception as error:
            logger.exception("step %d failed", plan.step_id)
            return outputs + self._scheduler.fail(plan, f"{type(error).__name__}: {error}")
        return outputs + self._scheduler.commit(plan, result)
