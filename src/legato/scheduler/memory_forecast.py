"""Forecasts of the lengths of running requests, by those of ended ones, and of their blocks."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from legato.core.request import Request

_WINDOW = 512
"""Ended requests that are remembered."""

_PRIOR = 256
"""Expected output tokens before any request has ended: about a chat's mean."""

Counts = npt.NDArray[np.int64]


class OutputLengths:
    """Forecasts an output's length as a quantile of recent output lengths.

    Args:
        optimism: in [0, 1]. At 0 every request is expected to generate all that it may. Otherwise
            the forecast is the `1 - optimism` quantile of the recent outputs that were longer than
            this one is now; at 1, one token.
    """

    def __init__(self, optimism: float, max_model_len: int) -> None:
        self._optimism = optimism
        self._max_model_len = max_model_len
        self._recent = deque([_PRIOR], maxlen=_WINDOW)
        self._sorted: Counts | None = None  # the same; None if outdated

    def observe(self, num_tokens: int) -> None:
        """Record the length of an output that ended."""
        self._recent.append(num_tokens)
        self._sorted = None

    @property
    def longest(self) -> int:
        """Output tokens that hardly any request will exceed."""
        return int(self._ascending()[-1]) if self._optimism else self._max_model_len

    def expected_tokens(self, requests: Sequence[Request]) -> Counts:
        """Return the tokens that each request is still expected to generate, at least one: [R].

        An output longer than all that are known is expected to last as long again (Lindy's law).
        """
        num_tokens = np.array([r.num_tokens for r in requests])
        num_generated = num_tokens - np.array([r.num_prompt_tokens for r in requests])
        num_left = np.array([r.message.params.max_tokens for r in requests]) - num_generated
        num_allowed: Counts = np.clip(num_left, 1, np.maximum(1, self._max_model_len - num_tokens))
        if not self._optimism:
            return num_allowed
        return np.clip(self._believed_tokens(num_generated), 1, num_allowed)

    def _believed_tokens(self, num_generated: Counts) -> Counts:
        recent = self._ascending()
        first_longer = recent.searchsorted(num_generated, side="right")
        num_longer = len(recent) - first_longer
        num_within = np.ceil((1.0 - self._optimism) * num_longer).astype(np.int64)
        lengths = recent[first_longer + num_within - 1]
        # At optimism 1 `num_within` is 0: the result is 0, which the caller raises to one token.
        left = np.where(num_within, lengths - num_generated, 0)
        believed: Counts = np.where(num_longer, left, num_generated)
        return believed

    def _ascending(self) -> Counts:
        if self._sorted is None:
            self._sorted = np.sort(self._recent)
        return self._sorted


class MemoryForecast:
    """Plays running requests forward to their expected ends, all at the same pace.

    A request that ends returns its blocks, and the others can grow into them. So the highest level
    on the way counts, not the sum at all ends (Gong et al., Past-Future Scheduler, ASPLOS 2025).
    """

    def __init__(self, running: Sequence[Request], lengths: OutputLengths, block_size: int) -> None:
        self._lengths = lengths
        self._block_size = block_size
        self._ends = self._foresee(running)
        self._asked: Request | None = None
        self._answer = 0

    def add(self, request: Request) -> None:
        """Add a running request."""
        self._ends = self._with(request)
        self._asked = None

    def peak_blocks(self, request: Request) -> int:
        """Return the peak growth in blocks if the request runs too.

        The growth is that beyond the blocks in use now and the request's first blocks.
        """
        if request is not self._asked:  # asked repeatedly for the next waiting request
            self._asked, self._answer = request, self._peak_blocks(request)
        return self._answer

    def _peak_blocks(self, request: Request) -> int:
        num_tokens, num_blocks = self._with(request)
        by_end = num_tokens.argsort()
        given_back = num_blocks[by_end].cumsum() - num_blocks[by_end]  # [R], before each end
        num_left = np.arange(len(by_end), 0, -1)
        grown = num_left * -(-num_tokens[by_end] // self._block_size)
        return int((grown - given_back).max())

    def _with(self, request: Request) -> Counts:
        return np.concatenate((self._ends, self._foresee([request])), axis=1)

    def _foresee(self, requests: Sequence[Request]) -> Counts:
        """Return each request's tokens until its end, and present blocks that its end frees."""
        # Other requests may share the blocks that a request found in the cache.
        num_own = np.array([r.num_tokens - r.num_cached_tokens for r in requests])
        num_tokens = self._lengths.expected_tokens(requests)
        return np.stack((num_tokens, -(-num_own // self._block_size)))  # [2, R]
