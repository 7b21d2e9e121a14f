"""What the trials of a capacity send: requests of one source, at random."""

import msgspec
import numpy as np

from legato.bench.workload.requests import Workload, WorkloadRequest
from legato.core.errors import ConfigError


class TrialSource:
    """Draws the requests of trials.

    Each request of the source comes once, in a random order, before any of them comes again: a
    trial may need more requests than there are.

    Raises:
        ConfigError: the source is empty.
    """

    def __init__(self, requests: Workload) -> None:
        if not requests:
            raise ConfigError("the workload has no requests")
        self.requests = requests
        self._num_hash_ids = 1 + max((max(r.hash_ids, default=-1) for r in requests), default=-1)

    def draw(self, rate_per_s: float, num_requests: int, seed: int) -> Workload:
        """Poisson arrivals from 0 on, given that so many come in `num_requests / rate_per_s`.

        With one seed, every rate has the same requests and the same pattern, only stretched, and a
        longer trial begins with those of a shorter one.
        """
        order_rng, gaps_rng = np.random.default_rng(seed).spawn(2)
        num_rounds = -(-num_requests // len(self.requests))
        orders = [order_rng.permutation(len(self.requests)) for _ in range(num_rounds)]
        order = np.concatenate(orders)[:num_requests]
        passed = np.cumsum(gaps_rng.exponential(size=num_requests + 1))
        arrivals_s = passed[:-1] / passed[-1] * num_requests / rate_per_s
        return [
            self._request(place, number // len(self.requests), arrival_s)
            for number, (place, arrival_s) in enumerate(
                zip(order.tolist(), arrivals_s.tolist(), strict=True)
            )
        ]

    def _request(self, place: int, num_round: int, arrival_s: float) -> WorkloadRequest:
        """One that comes again shares nothing with its first coming, which a cache may hold."""
        request = self.requests[place]
        shift = num_round * self._num_hash_ids
        hash_ids = tuple(hash_id + shift for hash_id in request.hash_ids)
        return msgspec.structs.replace(request, arrival_s=arrival_s, hash_ids=hash_ids)
