"""TTFT on an idle server; the rest of a TTFT is scheduling delay."""

import math
from collections.abc import Iterable

import msgspec
import numpy as np

from legato.core.errors import ConfigError
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.workload import Workload, WorkloadRequest

_NUM_LENGTHS = 5
_NUM_REPEATS = 3


class UnloadedTtft(msgspec.Struct, frozen=True):
    """TTFT of prompts that share the server with no other request.

    Attributes:
        num_prompt_tokens: lengths, ascending.
        ttft_s: one for each.
    """

    num_prompt_tokens: list[int]
    ttft_s: list[float]

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> "UnloadedTtft":
        """Take the best record of each length, so that a cold start does not count.

        Raises:
            ConfigError: one of the requests failed.
        """
        best_s: dict[int, float] = {}  # key: prompt length
        for record in records:
            if record.ttft_s is None:
                raise ConfigError(f"the idle server does not serve this: {record.error}")
            length = record.request.num_prompt_tokens
            best_s[length] = min(record.ttft_s, best_s.get(length, math.inf))
        lengths = sorted(best_s)
        return cls(lengths, [best_s[length] for length in lengths])

    def at(self, num_prompt_tokens: int) -> float:
        """Return the TTFT of any length, interpolated linearly."""
        return float(np.interp(num_prompt_tokens, self.num_prompt_tokens, self.ttft_s))


def unloaded_workload(workload: Workload) -> Workload:
    """Return the requests to measure, one at a time, for `UnloadedTtft.of`."""
    lengths = [request.num_prompt_tokens for request in workload]
    quantiles = np.quantile(lengths, np.linspace(0, 1, _NUM_LENGTHS), method="nearest")
    return [
        WorkloadRequest(0.0, int(length), 1)
        for length in np.unique(quantiles)
        for _ in range(_NUM_REPEATS)
    ]
