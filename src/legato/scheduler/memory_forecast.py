"""Forecast of the blocks that running requests will need."""

from collections.abc import Sequence

import numpy as np

from legato.core.request import Request
from legato.scheduler.output_lengths import Counts, OutputLengths


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
