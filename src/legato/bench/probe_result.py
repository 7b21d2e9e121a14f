"""What a probe saw."""

import itertools

import msgspec
import numpy as np


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds from the moment the long prompts were sent.

    Attributes:
        token_times_s: for each stream, when its tokens came.
        window_start_s: from when on the steady state was measured (negative).
        long_ttfts_s: for each long prompt, when its first token came.
    """

    token_times_s: list[list[float]]
    window_start_s: float
    long_ttfts_s: list[float]

    @property
    def ttft_s(self) -> float:
        """When the last of the long prompts had its first token."""
        return max(self.long_ttfts_s)

    def itl_s(self, *, during: bool) -> np.ndarray:
        """Gaps between tokens while long prompts were prefilled, or before they came: float [N]."""
        gaps = []
        for times in self.token_times_s:
            for previous, current in itertools.pairwise(times):
                if during and current > 0.0 and previous < self.ttft_s:
                    gaps.append(current - previous)
                if not during and previous >= self.window_start_s and current <= 0.0:
                    gaps.append(current - previous)
        return np.array(gaps)

    def tokens_per_s(self, *, during: bool) -> float:
        """Of all streams together, while long prompts were prefilled or before they came."""
        start_s, end_s = (0.0, self.ttft_s) if during else (self.window_start_s, 0.0)
        times_s = itertools.chain.from_iterable(self.token_times_s)
        return sum(start_s < at_s <= end_s for at_s in times_s) / (end_s - start_s)
