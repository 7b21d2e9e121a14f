"""The requests of a capacity search's trials, drawn at random from one source."""

import msgspec
import numpy as np

from legato.core.errors import ConfigError
from legato_lab.simulation.workload import Workload, WorkloadRequest

_NUM_GROUPS = 16
"""Groups of prompts by length; in a few hundred requests, each has outputs of all lengths."""


class TrialSource:
    """Draws the requests of trials.

    Even a short trial resembles its source: ordered by prompt length, and among similar prompts by
    output length, its requests are evenly spaced (a systematic sample). No request is repeated
    before all have been used; a trial larger than its source repeats them.

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
        """Draw requests with Poisson arrivals within `num_requests / rate_per_s` seconds.

        The seed decides the requests, their order and their arrivals. With the same number of
        requests, every rate has the same arrivals, only stretched.
        """
        which_rng, gaps_rng = np.random.default_rng(seed).spawn(2)
        apart = len(self.requests) / num_requests
        places = ((np.arange(num_requests) + which_rng.random()) * apart).astype(np.int64)
        times = np.arange(num_requests) - np.searchsorted(places, places)  # earlier uses of each
        order = which_rng.permutation(num_requests)
        passed = np.cumsum(gaps_rng.exponential(size=num_requests + 1))
        arrivals_s = passed[:-1] / passed[-1] * num_requests / rate_per_s
        return [
            self._request(int(places[index]), int(times[index]), arrival_s)
            for index, arrival_s in zip(order.tolist(), arrivals_s.tolist(), strict=True)
        ]

    def _request(self, place: int, num_times: int, arrival_s: float) -> WorkloadRequest:
        """Return a request. A repeated one shares no blocks with its first use, perhaps cached."""
        request = self.requests[self._by_length[place]]
        shift = num_times * self._num_hash_ids
        hash_ids = tuple(hash_id + shift for hash_id in request.hash_ids)
        return msgspec.structs.replace(request, arrival_s=arrival_s, hash_ids=hash_ids)


def _sorted_by_length(requests: Workload) -> list[int]:
    """Sort places by groups of prompt length, and within these by output length.

    The order of outputs alternates between groups.
    """
    prompts = np.array([request.num_prompt_tokens for request in requests])
    outputs = np.array([request.num_output_tokens for request in requests])
    ranks = np.argsort(np.argsort(prompts, kind="stable"))
    groups = ranks * _NUM_GROUPS // len(requests)
    places: list[int] = np.lexsort((np.where(groups % 2, outputs, -outputs), groups)).tolist()
    return places
