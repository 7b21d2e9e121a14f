"""Keeps the latest steps, for a subscriber that comes late."""

from collections import deque
from collections.abc import Sequence

from legato.core.step_record import StepRecord

_MAX_CHUNKS = 4096
"""Chunks kept, over all steps: half a megabyte, or at least ten seconds of a few streams."""


class RecentSteps:
    """The records of the latest steps, with at most `_MAX_CHUNKS` chunks in all."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque()
        self._num_chunks = 0

    @property
    def steps(self) -> Sequence[StepRecord]:
        """The steps in the order in which they ended."""
        return tuple(self._steps)

    def note(self, step: StepRecord) -> None:
        """Record a step that has run."""
        self._steps.append(step)
        self._num_chunks += len(step.chunks)
        while self._num_chunks > _MAX_CHUNKS:
            self._num_chunks -= len(self._steps.popleft().chunks)

    def clear(self) -> None:
        """Drop all steps; later ones are a new engine's."""
        self._steps.clear()
        self._num_chunks = 0
