"""What the trials of a capacity send: requests of one source, at random."""

import msgspec
import numpy as np

from legato.bench.workload.requests import Workload
from legato.core.errors import ConfigError

_NUM_GROUPS = 16
"""Of prompts by their length: in a few hundred requests, each has outputs of all lengths."""


class TrialSource:
    """Draws the requests of trials.

    A trial is like its source however short it is: by the lengths of prompts, and among similar
    prompts of outputs, its requests are an even number of places apart (a systematic sample). No
    request comes again before all have come, which they do where a trial needs more than there are.

    Raises:
        ConfigError: the source is empty.
    """

    def __init__(self, requests: Workload) -> None:
        if not requests:
            raise ConfigError("the workload has no requests")
        self.requests = requests
        self._by_length = _sorted_by_length(requests)

    def draw(self, rate_per_s: float, num_requests: int, seed: int) -> Workload:
        """Poisson arrivals from 0 on, given that so many come in `num_requests / rate_per_s`.

        The seed says which requests come, in which order, and when. With as many requests, every
        rate has the same, only stretched.
        """
        which_rng, gaps_rng = np.random.default_rng(seed).spawn(2)
        apart = len(self.requests) / num_requests
        places = ((np.arange(num_requests) + which_rng.random()) * apart).astype(np.int64)
        drawn = which_rng.permutation(self._by_length[places])
        passed = np.cumsum(gaps_rng.exponential(size=num_requests + 1))
        arrivals_s = passed[:-1] / passed[-1] * num_requests / rate_per_s
        return [
            msgspec.structs.replace(self.requests[place], arrival_s=arrival_s)
            for place, arrival_s in zip(drawn.tolist(), arrivals_s.tolist(), strict=True)
        ]


def _sorted_by_length(requests: Workload) -> np.ndarray:
    """Places: int [N], by prompts in groups, and by outputs within these, up and down in turn."""
    prompts = np.array([request.num_prompt_tokens for request in requests])
    outputs = np.array([request.num_output_tokens for request in requests])
    ranks = np.argsort(np.argsort(prompts, kind="stable"))
    groups = ranks * _NUM_GROUPS // len(requests)
    return np.lexsort((np.where(groups % 2, outputs, -outputs), groups))
