"""Pools the hidden states of a prompt, in as many chunks as it takes."""

import numpy as np
import numpy.typing as npt

from legato.core.plan import ScheduledChunk
from legato.core.pooling import PromptPooling

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]


class PooledPrompt:
    """The vector of a prompt, the mean over one or all of its hidden states, while it grows.

    Sums are float64, so that the chunks into which a prompt is cut leave no trace in them.

    Args:
        num_tokens: of the prompt.
        head: [labels, E], applied to the pooled vector of a score.
    """

    def __init__(
        self, pooling: PromptPooling, num_tokens: int, head: Float32s | None = None
    ) -> None:
        self._head = head if pooling == "score" else None
        self._first = 0 if pooling == "mean" else num_tokens - 1
        self._next = self._first  # tokens from here on are still to be summed
        self._end = num_tokens
        self._sum: Float64s | None = None

    def positions(self, chunk: ScheduledChunk) -> range:
        """Return the positions whose hidden states a step has to sum, none of them twice.

        Tokens before `_next` were summed before a preemption.
        """
        return range(max(chunk.start, self._next), min(chunk.end, self._end))

    def add(self, chunk: ScheduledChunk, total: Float64s) -> None:
        """Add the sum [E] over `positions(chunk)`, once the step can no longer fail."""
        self._sum = total if self._sum is None else self._sum + total
        self._next = chunk.end

    @property
    def vector(self) -> bytes | None:
        """The pooled vector, float32 [E], or outputs of the head [labels].

        None before the last token's hidden state is in it.
        """
        if self._sum is None or self._next < self._end:
            return None
        mean = self._sum / (self._end - self._first)
        if self._head is not None:
            mean = self._head.astype(np.float64) @ mean
        return mean.astype(np.float32).tobytes()
