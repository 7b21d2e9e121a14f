"""Clients' records of a server: of each request, and of streams beside long prompts."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from legato_lab.simulation.workload import WorkloadRequest

Status = Literal["ok", "refused", "error", "cancelled"]

OnProgress = Callable[[Counter[Status]], None]
"""Called at intervals with the number of requests by status; those in flight are "cancelled"."""


class RequestError(Exception):
    """The server did not finish the request, or cannot be reached."""


class RefusedError(RequestError):
    """The server refused the request (429).

    Attributes:
        retry_after_s: when it may be sent again, if the server said so.
    """

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request as its client saw it. All times are from the start of the run.

    Attributes:
        sent_s: when it was sent; later than `request.arrival_s` if the client could not keep up.
        status: "refused" is a 429; "cancelled" requests had not ended when the run was stopped.
        token_times_s: when its tokens came; tokens that came together have one entry.
        num_tokens: that came, as the server counted them.
        retry_after_s: as in the refusal, if it said so.
        num_cached_tokens: prompt tokens that the server found in its cache; None if it does not
            say.
    """

    request: WorkloadRequest
    sent_s: float
    status: Status
    token_times_s: list[float] = []
    num_tokens: int = 0
    retry_after_s: float | None = None
    error: str | None = None
    num_cached_tokens: int | None = None

    @property
    def ttft_s(self) -> float | None:
        """TTFT from the due time: a client that is late does not flatter the server."""
        return self.token_times_s[0] - self.request.arrival_s if self.token_times_s else None

    @property
    def itl_s(self) -> np.ndarray:
        """Time between one token, or several at once, and the next: float [N - 1]."""
        return np.diff(self.token_times_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean time for each token after the first; None without such tokens."""
        if self.num_tokens < 2 or len(self.token_times_s) < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Time from the due time to the last token."""
        return self.token_times_s[-1] - self.request.arrival_s if self.token_times_s else None

    @property
    def last_event_s(self) -> float:
        """When the client last sent or received anything of it."""
        return self.token_times_s[-1] if self.token_times_s else self.sent_s


StopWhen = Callable[[float, Sequence[RequestRecord]], bool]
"""Called at intervals during a run; returns whether to stop it.

Gets the seconds since the start, and the records in the order in which requests were sent.
"""


def gaps_s(records: Iterable[RequestRecord]) -> np.ndarray:
    """Concatenate the `itl_s` of all records: float [N]."""
    return np.concatenate([np.empty(0), *(record.itl_s for record in records)])


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds from the moment the long prompts were sent.

    Attributes:
        token_times_s: for each stream, when its tokens came; tokens that came together have one
            entry.
        token_counts: for each stream, the number of tokens in each entry; empty if always 1.
        window_start_s: when the measurement of the steady state began (negative).
        long_ttfts_s: for each long prompt, when its first token came.
    """

    token_times_s: list[list[float]]
    window_start_s: float
    long_ttfts_s: list[float]
    token_counts: list[list[int]] = []

    @property
    def ttft_s(self) -> float:
        """When the last of the long prompts had its first token."""
        return max(self.long_ttfts_s)

    def itl_s(self, *, during: bool, streams: slice = slice(None)) -> np.ndarray:
        """Gaps of streams while long prompts were prefilled, or before they came: float [N]."""
        gaps = []
        for times in self.token_times_s[streams]:
            for previous, current in itertools.pairwise(times):
                if during and current > 0.0 and previous < self.ttft_s:
                    gaps.append(current - previous)
                if not during and previous >= self.window_start_s and current <= 0.0:
                    gaps.append(current - previous)
        return np.array(gaps)

    def tokens_per_s(self, *, during: bool) -> float:
        """Rate of all streams together, while long prompts were prefilled or before they came."""
        start_s, end_s = (0.0, self.ttft_s) if during else (self.window_start_s, 0.0)
        num_tokens = 0
        for times_s, counts in itertools.zip_longest(self.token_times_s, self.token_counts):
            each = zip(times_s, counts or itertools.repeat(1), strict=False)
            num_tokens += sum(count for at_s, count in each if start_s < at_s <= end_s)
        return num_tokens / (end_s - start_s)
