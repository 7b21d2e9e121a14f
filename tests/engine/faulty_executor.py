"""Faults at the executor's boundary."""

from collections import deque
from collections.abc import Callable, Sequence

from legato.core.plan import BlockMove, StepPlan, StepResult
from legato.executor.executor import Executor

FindFault = Callable[[StepPlan], Exception | None]
"""What a step raises; None if it does not."""


class FaultyExecutor:
    """Raises in some steps what `find_fault` finds, and runs the others on a real executor.

    Args:
        fails_late: whether a step fails when it is collected, as on a device, rather than when it
            is submitted. Those behind it are dropped then.

    Attributes:
        steps: all that were computed, in order.
        most_in_flight: steps at once, so far.
        failures_of_moves: what the next calls of `move` raise, which then copy nothing.
        moves: copies that were made, in order.
    """

    def __init__(
        self, executor: Executor, find_fault: FindFault, *, fails_late: bool = False
    ) -> None:
        self.steps: list[StepPlan] = []
        self.find_fault = find_fault
        self.most_in_flight = 0
        self.failures_of_moves: list[Exception] = []
        self.moves: list[BlockMove] = []
        self._executor = executor
        self._fails_late = fails_late
        self._in_flight: deque[tuple[StepPlan, Exception | None]] = deque()

    @property
    def depth(self) -> int:
        return self._executor.depth

    @property
    def drops_rows(self) -> bool:
        return self._executor.drops_rows

    def move(self, moves: Sequence[BlockMove]) -> None:
        if self.failures_of_moves:
            raise self.failures_of_moves.pop(0)
        self.moves += moves
        self._executor.move(moves)

    def submit(self, plan: StepPlan) -> None:
        error = self.find_fault(plan)
        if error is not None and not self._fails_late:
            raise error
        self._executor.submit(plan)
        self._in_flight.append((plan, error))
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))

    def collect(self) -> StepResult:
        plan, error = self._in_flight.popleft()
        result = self._executor.collect()
        if error is None:
            self.steps.append(plan)
            return result
        for _ in self._in_flight:
            self._executor.collect()
        self._in_flight.clear()
        raise error


def poisoned(request_id: str) -> bool:
    return request_id.startswith("poison")


def poison(plan: StepPlan) -> Exception | None:
    """Every step fails that holds a request whose name says so."""
    is_poisoned = any(poisoned(chunk.request_id) for chunk in plan.chunks)
    return ValueError("boom") if is_poisoned else None


def little_memory(num_tokens: int) -> FindFault:
    """Steps fail that hold more than `num_tokens`."""
    return lambda plan: MemoryError("full") if plan.num_tokens > num_tokens else None
