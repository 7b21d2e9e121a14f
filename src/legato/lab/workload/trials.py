"""What the trials of a capacity send: requests of one source, at random."""

import msgspec
import numpy as np

from legato.core.errors import ConfigError
from legato.simulation.workload import Workload, WorkloadRequest

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
        self._num_hash_ids = 1 + max((max(r.hash_ids, default=-1) for r in requests), default=-1)
        self._by_length = _sorted_by_length(requests)

    def draw(self, rate_per_s: float, num_requests: int, seed: int) -> Workload:
        """Poisson arrivals from 0 on, given that so many come in `num_requests / rate_per_s`.

        The seed says which requests come, in which order, and when. With as many requests, every
        rate has the same, only stretched.
        """
        which_rng, gaps_rng = np.random.default_rng(seed).spawn(2)
        apart = len(self.requests) / num_requests
        places = ((np.arange(num_requests) + which_rng.random()) * apart).astype(np.int64)
        times = np.arange(num_requests) - np.searchsorted(places, places)  # that each came before
        order = which_rng.permutation(num_requests)
        passed = np.cumsum(gaps_rng.exponential(size=num_requests + 1))
        arrivals_s = passed[:-1] / passed[-1] * num_requests / rate_per_s
        return [
            self._request(int(places[index]), int(times[index]), arrival_s)
            for index, arrival_s in zip(order.tolist(), arrivals_s.tolist(), strict=True)
        ]

    def _request(self, place: int, num_times: int, arrival_s: float) -> WorkloadRequest:
        """One that comes again shares nothing with its first coming, which a cache may hold."""
        request = self.requests[self._by_length[place]]
        shift = num_times * self._num_hash_ids
        hash_ids = tuple(hash_id + shift for hash_id in request.hash_ids)
        return msgspec.structs.replace(request, arrival_s=arrival_s, hash_ids=hash_ids)


def _sorted_by_length(requests: Workload) -> list[int]:
    """Places, by prompts in groups, and by outputs within these, up and down in turn."""
    prompts = np.array([request.num_prompt_tokens for request in requests])
    outputs = np.array([request.num_output_tokens for request in requests])
    ranks = np.argsort(np.argsort(prompts, kind="stable"))
    groups = ranks * _NUM_GROUPS // len(requests)
    places: list[int] = np.lexsort((np.where(groups % 2, outputs, -outputs), groups)).tolist()
    return places
