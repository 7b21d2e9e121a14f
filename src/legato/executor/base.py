"""What runs a step."""

from collections.abc import Sequence
from typing import Protocol

from legato.core.plan import BlockMove, StepPlan, StepResult


class Executor(Protocol):
    """Runs step plans in the order they are submitted.

    Two calls, so that a device can work on one step while the next is prepared. Either may raise:
    `MemoryError` where the step wants more memory than there is, anything else for other faults. No
    request has then moved, so that the same chunks may be submitted again, all or some of them;
    but who is new and who has ended has been noted.
    """

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks to and from host memory, one after the other, before the next step."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Begin a step."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step submitted and return what it sampled."""
        ...
