"""An executor that computes nothing and takes time only on its clock."""

import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence

from legato.core.plan import BlockMove, ChunkResult, ScheduledChunk, StepPlan, StepResult


class VirtualClock:
    """A clock that moves only by `advance_to`."""

    def __init__(self) -> None:
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        return self._now_s

    def __call__(self) -> float:
        return self.now_s

    def advance_to(self, time_s: float) -> None:
        """Move the clock forward to `time_s`; it never moves back."""
        self._now_s = max(self._now_s, time_s)


class RealTimeClock(VirtualClock):
    """The machine's monotonic clock: `advance_to` waits."""

    @property
    def now_s(self) -> float:
        return time.monotonic()

    def advance_to(self, time_s: float) -> None:
        """Wait until `time_s`."""
        time.sleep(max(0.0, time_s - self.now_s))


class SimulatedExecutor:
    """Stands in for the model: each step takes `step_time_s` seconds.

    A sampled token depends only on the request and its position, as a greedy model's token would
    depend only on the request's tokens: the schedule cannot change it. A draft is right if it
    equals that token.

    Args:
        step_time_s: duration of a step in seconds, from its plan.
        vocab_size: tokens are drawn from [0, vocab_size).
        depth: steps that may be in flight; each begins when the one before it ends.
    """

    drops_rows = False
    """Whole steps have a duration, not layers."""

    def __init__(
        self,
        clock: VirtualClock,
        step_time_s: Callable[[StepPlan], float],
        *,
        vocab_size: int = 32_000,
        depth: int = 1,
    ) -> None:
        self.depth = depth
        self._clock = clock
        self._step_time_s = step_time_s
        self._vocab_size = vocab_size
        self._submitted: deque[tuple[StepPlan, float, float]] = deque()  # (plan, begins, ends)

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Do nothing: there are no blocks to copy."""

    def submit(self, plan: StepPlan) -> None:
        begins_s = max(self._submitted[-1][2] if self._submitted else 0.0, self._clock.now_s)
        self._submitted.append((plan, begins_s, begins_s + self._step_time_s(plan)))

    def collect(self) -> StepResult:
        plan, begins_s, ends_s = self._submitted.popleft()
        self._clock.advance_to(ends_s)
        return StepResult(
            step_id=plan.step_id,
            seconds=ends_s - begins_s,
            chunks={chunk.request_id: self._result(chunk) for chunk in plan.chunks},
        )

    def _result(self, chunk: ScheduledChunk) -> ChunkResult:
        if chunk.num_samples == 1 and not chunk.draft_token_ids:  # nearly all chunks: a fast path
            end = chunk.start + chunk.num_tokens
            token_id = simulated_token(chunk.request_id, end, self._vocab_size)
            return ChunkResult(chunk.num_tokens, (token_id,))
        first = chunk.end - chunk.num_samples + 1
        sampled = [
            simulated_token(chunk.request_id, position, self._vocab_size)
            for position in range(first, chunk.end + 1)
        ]
        return chunk.result(sampled)


def simulated_token(request_id: str, position: int, vocab_size: int) -> int:
    """Return the token of a simulated request at `position`."""
    return zlib.crc32(f"{request_id}:{position}".encode()) % vocab_size
