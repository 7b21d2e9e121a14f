"""Faults at the executor's boundary."""

from collections.abc import Callable, Sequence

from legato.core.plan import BlockMove, StepPlan, StepResult
from legato.executor.base import Executor

FindFault = Callable[[StepPlan], Exception | None]
"""What a step raises; None if it does not."""


class FaultyExecutor:
    """Raises in some steps what `find_fault` finds, and runs the others on a real executor.

    Attributes:
        steps: all that were computed, in order.
    """

    def __init__(self, executor: Executor, find_fault: FindFault) -> None:
        self.steps: list[StepPlan] = []
        self.find_fault = find_fault
        self._executor = executor

    @property
    def depth(self) -> int:
        return self._executor.depth

    def move(self, moves: Sequence[BlockMove]) -> None:
        self._executor.move(moves)

    def submit(self, plan: StepPlan) -> None:
        error = self.find_fault(plan)
        if error is not None:
            raise error
        self._executor.submit(plan)
        self.steps.append(plan)

    def collect(self) -> StepResult:
        return self._executor.collect()


def poisoned(request_id: str) -> bool:
    return request_id.startswith("poison")


def poison(plan: StepPlan) -> Exception | None:
    """Every step fails that holds a request whose name says so."""
    is_poisoned = any(poisoned(chunk.request_id) for chunk in plan.chunks)
    return ValueError("boom") if is_poisoned else None


def little_memory(num_tokens: int) -> FindFault:
    """Steps fail that hold more than `num_tokens`."""
    return lambda plan: MemoryError("full") if plan.num_tokens > num_tokens else None
