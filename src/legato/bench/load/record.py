"""What became of a request, as its client saw it."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
import numpy as np

from legato.bench.workload.workload import WorkloadRequest

Status = Literal["ok", "refused", "error", "cancelled"]

OnProgress = Callable[[Counter[Status]], None]
"""Told now and then how many requests have which status; those in flight are "cancelled"."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All times are from the start of the run.

    Attributes:
        sent_s: when it was sent; later than `request.arrival_s` where the client could not keep up.
        status: "refused" is a 429; "cancelled" had no end yet when the run was stopped.
        token_times_s: when its tokens came; where a server sends several at once, one entry for
            them all.
        num_tokens: that came, as the server counted them.
        retry_after_s: what a refusal said, if it said so.
    """

    request: WorkloadRequest
    sent_s: float
    status: Status
    token_times_s: list[float] = []
    num_tokens: int = 0
    retry_after_s: float | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """From when it was to be sent: a client that is late does not flatter the server."""
        return self.token_times_s[0] - self.request.arrival_s if self.token_times_s else None

    @property
    def itl_s(self) -> np.ndarray:
        """Time between one token and the next: float [N - 1]."""
        return np.diff(self.token_times_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean time for each token after the first; None where there is none."""
        if self.num_tokens < 2 or len(self.token_times_s) < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """From when it was to be sent to its last token."""
        return self.token_times_s[-1] - self.request.arrival_s if self.token_times_s else None

    @property
    def last_event_s(self) -> float:
        """When the client last had to do with it."""
        return self.token_times_s[-1] if self.token_times_s else self.sent_s


def gaps_s(records: Iterable[RequestRecord]) -> np.ndarray:
    """`itl_s` of all of them, one after the other: float [N]."""
    return np.concatenate([np.empty(0), *(record.itl_s for record in records)])
