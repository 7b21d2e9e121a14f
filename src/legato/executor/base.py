"""What runs a step."""

from collections.abc import Sequence
from typing import Protocol

from legato.core.plan import BlockMove, StepPlan, StepResult


class Executor(Protocol):
    """Runs step plans in the order they are submitted.

    Two calls, so that a device can work on one step while the next is prepared. Either may raise:
    `MemoryError` where the step wants more memory than there is, anything else for other faults. No
    request has then moved, so that the same chunks may be submitted again, all or some of them;
    but who is new and who has ended has been noted. A step that fails takes those with it that were
    submitted behind it: none of them is collected.

    A plan names positions, not tokens. Where it was made before the tokens of a step in flight were
    known, they are those that the executor samples there.

    Attributes:
        depth: most steps that may be in flight, submitted and not yet collected; at least 1.
    """

    @property
    def depth(self) -> int: ...

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks to and from host memory, one after the other, before the next step."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Begin a step."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step submitted; what it brought, and how long it took."""
        ...
