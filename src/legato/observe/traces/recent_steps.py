"""The latest steps, for who comes to watch when much has happened already."""

from collections import deque
from collections.abc import Sequence

from legato.core.step_record import StepRecord

_MAX_CHUNKS = 4096
"""That are kept of all steps together: half a megabyte, ten seconds or more of few streams."""


class RecentSteps:
    """The records of the latest steps, as many as have no more than `_MAX_CHUNKS` chunks."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque()
        self._num_chunks = 0

    @property
    def steps(self) -> Sequence[StepRecord]:
        """In the order in which they ended."""
        return tuple(self._steps)

    def note(self, step: StepRecord) -> None:
        """A step has run."""
        self._steps.append(step)
        self._num_chunks += len(step.chunks)
        while self._num_chunks > _MAX_CHUNKS:
            self._num_chunks -= len(self._steps.popleft().chunks)

    def clear(self) -> None:
        """What comes is another engine's."""
        self._steps.clear()
        self._num_chunks = 0
