"""The interface of executors."""

from collections.abc import Sequence
from typing import Protocol

from legato.core.plan import BlockMove, StepPlan, StepResult


class Executor(Protocol):
    """Runs step plans in the order they are submitted.

    There are two calls, so that a device works on one step while the next is prepared. Either may
    raise: `MemoryError` if the step needs more memory than there is, other errors for other
    faults. A failed step advances no request, so the same chunks, all or some, may be submitted
    again; but the executor has already recorded the plan's new and ended requests. Steps that were
    submitted after a failed one fail with it: none of them is collected.

    A plan names positions, not tokens. If it was made before a step in flight had sampled, the
    executor fills in the tokens that the earlier step samples.

    Attributes:
        depth: most steps that may be in flight (submitted, not yet collected); at least 1.
        drops_rows: whether it keeps deadlines; if not, no plan has one.
    """

    @property
    def depth(self) -> int: ...

    @property
    def drops_rows(self) -> bool: ...

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks to and from host memory, in this order, before the next step.

        Raises `MemoryError` before it copies any block, so that the call can be repeated.
        """
        ...

    def submit(self, plan: StepPlan) -> None:
        """Begin a step."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step; return its results and its duration."""
        ...
