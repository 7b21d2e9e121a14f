"""Blocks that running requests are going to need: what must be free for one more to be admitted."""

from bisect import insort
from collections.abc import Iterable

from legato.core.request import Request
from legato.scheduler.output_lengths import OutputLengths


class MemoryForecast:
    """Plays running requests forward to the end that is expected of each, all at the same pace.

    Whoever ends gives back its blocks, which the others can grow into; so what counts is the
    highest level on the way, not the sum of all ends (Gong et al., Past-Future Scheduler, ASPLOS
    2025).
    """

    def __init__(self, running: Iterable[Request], lengths: OutputLengths, block_size: int) -> None:
        self._lengths = lengths
        self._block_size = block_size
        # (tokens until it ends, blocks that it gives back then, of those that it has now)
        self._ends = sorted(map(self._end, running))

    def add(self, request: Request) -> None:
        """Have one more running."""
        insort(self._ends, self._end(request))

    def peak_blocks(self, request: Request) -> int:
        """The most that will be in use beyond what is now, and the request's, if it runs too."""
        ends = self._ends.copy()
        insort(ends, self._end(request))
        peak, num_given_back = 0, 0
        for num_ended, (num_tokens, num_blocks) in enumerate(ends):
            num_grown = (len(ends) - num_ended) * -(-num_tokens // self._block_size)
            peak = max(peak, num_grown - num_given_back)
            num_given_back += num_blocks
        return peak

    def _end(self, request: Request) -> tuple[int, int]:
        # What it found in the cache may be others' too.
        num_own = request.num_tokens - request.num_cached_tokens
        return self._lengths.num_expected_tokens(request), -(-num_own // self._block_size)
