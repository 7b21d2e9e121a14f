"""What runs a step."""

from typing import Protocol

from legato.core.plan import StepPlan, StepResult


class Executor(Protocol):
    """Runs step plans in the order they are submitted.

    Two calls, so that a device can work on one step while the next is prepared.
    """

    def submit(self, plan: StepPlan) -> None:
        """Begin a step."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step submitted and return what it sampled; raises what it raised."""
        ...
