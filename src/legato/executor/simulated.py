"""An executor that computes nothing and takes no time but the virtual clock's."""

import zlib
from collections import deque
from collections.abc import Callable, Sequence

from legato.core.plan import BlockMove, StepPlan, StepResult


class VirtualClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance_to(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


class SimulatedExecutor:
    """Stands in for the model: each step lasts what `step_time_s` says.

    A sampled token is a function of the request and its position alone, as a greedy model's would
    be of the request's own tokens: what a schedule did cannot show in them.

    Args:
        step_time_s: duration of a step in seconds, from its plan.
        vocab_size: tokens are drawn from [0, vocab_size).
    """

    def __init__(
        self,
        clock: VirtualClock,
        step_time_s: Callable[[StepPlan], float],
        *,
        vocab_size: int = 32_000,
    ) -> None:
        self._clock = clock
        self._step_time_s = step_time_s
        self._vocab_size = vocab_size
        self._submitted: deque[tuple[StepPlan, float]] = deque()  # (plan, time at which it ends)

    def move(self, moves: Sequence[BlockMove]) -> None:
        """There is nothing to copy."""

    def submit(self, plan: StepPlan) -> None:
        starts_s = self._submitted[-1][1] if self._submitted else self._clock.now_s
        self._submitted.append((plan, starts_s + self._step_time_s(plan)))

    def collect(self) -> StepResult:
        plan, ends_s = self._submitted.popleft()
        self._clock.advance_to(ends_s)
        sampled = {
            chunk.request_id: [
                simulated_token(chunk.request_id, chunk.end - i, self._vocab_size)
                for i in reversed(range(chunk.num_samples))
            ]
            for chunk in plan.chunks
            if chunk.num_samples
        }
        return StepResult(step_id=plan.step_id, sampled=sampled)


def simulated_token(request_id: str, position: int, vocab_size: int) -> int:
    """The token that a simulated request has at `position`."""
    return zlib.crc32(f"{request_id}:{position}".encode()) % vocab_size
