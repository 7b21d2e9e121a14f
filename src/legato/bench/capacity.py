"""How much load a server sustains, after Sarathi-Serve (arXiv:2403.02310): the largest Poisson rate
at which P99 ITL keeps its SLO and the median scheduling delay stays below two seconds.

From outside, a request's scheduling delay is its TTFT less that of the same prompt on an idle
server. Nothing here knows of clocks or HTTP, so that simulated trials can be searched, too.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from legato.bench.load.record import RequestRecord, gaps_s
from legato.bench.workload.requests import Workload, WorkloadRequest
from legato.core.errors import ConfigError
from legato.core.slo import P99

_NUM_LENGTHS = 5
_NUM_REPEATS = 3
# One in so many may be otherwise.
_GAPS_PER_LATE = 100
_REQUESTS_PER_DELAYED = 2
_REQUESTS_PER_FAILED = 100
_MAX_DOUBLINGS = 12
_MAX_HALVINGS = 5  # a trial takes twice as long each time

RunTrial = Callable[[float], Sequence[RequestRecord]]
"""Serves a workload at a Poisson rate, in requests a second, and says what became of it."""


class UnloadedTtft(msgspec.Struct, frozen=True):
    """TTFT of prompts that meet no other request.

    Attributes:
        num_prompt_tokens: lengths, ascending.
        ttft_s: one for each.
    """

    num_prompt_tokens: list[int]
    ttft_s: list[float]

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> "UnloadedTtft":
        """The best of the records of each length, so that a cold start does not count.

        Raises:
            ConfigError: one of the requests failed.
        """
        best_s: dict[int, float] = {}  # key prompt length
        for record in records:
            if record.ttft_s is None:
                raise ConfigError(f"the idle server does not serve this: {record.error}")
            length = record.request.num_prompt_tokens
            best_s[length] = min(record.ttft_s, best_s.get(length, math.inf))
        lengths = sorted(best_s)
        return cls(lengths, [best_s[length] for length in lengths])

    def at(self, num_prompt_tokens: int) -> float:
        """Of any length, in between linearly."""
        return float(np.interp(num_prompt_tokens, self.num_prompt_tokens, self.ttft_s))


def unloaded_workload(workload: Workload) -> Workload:
    """Requests from whose records, sent one at a time, `UnloadedTtft` is made."""
    lengths = [request.num_prompt_tokens for request in workload]
    quantiles = np.quantile(lengths, np.linspace(0, 1, _NUM_LENGTHS), method="nearest")
    return [
        WorkloadRequest(0.0, int(length), 1)
        for length in np.unique(quantiles)
        for _ in range(_NUM_REPEATS)
    ]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests at one rate.

    Attributes:
        num_failed: those refused or failed.
        p99_itl_s: over all gaps of all requests; None where there is none.
        median_delay_s: scheduling delay; None where half of the requests had no first token.
    """

    rate_per_s: float
    num_requests: int
    num_failed: int
    p99_itl_s: float | None
    median_delay_s: float | None
    is_sustained: bool


class CapacityRule(msgspec.Struct, frozen=True, kw_only=True):
    """When a rate is sustained.

    Attributes:
        itl_slo_s: at most one gap in 100 is longer, or as many as `itl_slo_quantile` leaves.
        max_delay_s: at most half of the scheduling delays are longer.
    """

    itl_slo_s: float
    itl_slo_quantile: float = P99
    max_delay_s: float = 2.0
    unloaded: UnloadedTtft

    def judge(self, rate_per_s: float, records: Sequence[RequestRecord]) -> Trial:
        """The verdict on a trial that has ended. At most one request in 100 may fail."""
        itl_s = gaps_s(records).tolist()
        delays_s = [self._delay_s(record, math.inf) for record in records]
        return Trial(
            rate_per_s=rate_per_s,
            num_requests=len(records),
            num_failed=_num_failed(records),
            p99_itl_s=_largest_but(len(itl_s) // _GAPS_PER_LATE, itl_s),
            median_delay_s=_largest_but(len(delays_s) // _REQUESTS_PER_DELAYED, delays_s),
            is_sustained=not self._is_broken(records, len(records), len(itl_s), math.inf),
        )

    def is_lost(self, workload: Workload, now_s: float, records: Sequence[RequestRecord]) -> bool:
        """Whether a trial that still runs can no longer be sustained, whatever is to come.

        Args:
            records: of the requests sent so far.
        """
        num_gaps = sum(request.num_output_tokens - 1 for request in workload)
        return self._is_broken(records, len(workload), num_gaps, now_s)

    def _is_broken(
        self, records: Sequence[RequestRecord], num_requests: int, num_gaps: int, now_s: float
    ) -> bool:
        num_late = sum(int((record.itl_s > self.itl_slo_s).sum()) for record in records)
        num_delayed = sum(self._delay_s(record, now_s) > self.max_delay_s for record in records)
        return (
            num_late > self._num_allowed(num_gaps)
            or num_delayed > num_requests // _REQUESTS_PER_DELAYED
            or _num_failed(records) > num_requests // _REQUESTS_PER_FAILED
        )

    def _num_allowed(self, num_gaps: int) -> int:
        """Gaps that may be late."""
        return int(round(num_gaps * (1.0 - self.itl_slo_quantile), 6))

    def _delay_s(self, record: RequestRecord, now_s: float) -> float:
        """Scheduling delay, so far where the first token is yet to come."""
        ttft_s = record.ttft_s
        if ttft_s is None:
            ttft_s = now_s - record.request.arrival_s
        return ttft_s - self.unloaded.at(record.request.num_prompt_tokens)


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found.

    Attributes:
        rate_per_s: the largest rate that was sustained; 0 if none was.
        trials: in the order in which they were run.
    """

    rate_per_s: float
    rule: CapacityRule
    trials: list[Trial]


def find_capacity(
    run_trial: RunTrial,
    rule: CapacityRule,
    *,
    start_rate_per_s: float = 1.0,
    precision: float = 0.1,
    on_trial: Callable[[Trial], None] | None = None,
) -> Capacity:
    """Search for the largest rate that is sustained.

    Doubles or halves the rate until the answer is between two, then bisects their logarithms.

    Args:
        precision: the rate that is found and one that is not sustained differ by this fraction at
            most.
        on_trial: told each verdict.

    Raises:
        ConfigError: the first rate is infinite.
    """
    if not math.isfinite(start_rate_per_s):
        raise ConfigError("a search for the capacity begins with a finite rate")
    trials: list[Trial] = []

    def is_sustained(rate_per_s: float) -> bool:
        trial = rule.judge(rate_per_s, run_trial(rate_per_s))
        trials.append(trial)
        if on_trial is not None:
            on_trial(trial)
        return trial.is_sustained

    low, high = _bracket(is_sustained, start_rate_per_s)
    while low > 0.0 and low * (1.0 + precision) < high < math.inf:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_sustained(middle) else (low, middle)
    return Capacity(rate_per_s=low, rule=rule, trials=trials)


def _bracket(is_sustained: Callable[[float], bool], rate_per_s: float) -> tuple[float, float]:
    """A sustained rate and twice that, which is not; (0, ...) or (..., inf) if it is far away."""
    starts_sustained = is_sustained(rate_per_s)
    factor, num_trials = (2.0, _MAX_DOUBLINGS) if starts_sustained else (0.5, _MAX_HALVINGS)
    for _ in range(num_trials):
        following = rate_per_s * factor
        if is_sustained(following) != starts_sustained:
            return min(rate_per_s, following), max(rate_per_s, following)
        rate_per_s = following
    return (rate_per_s, math.inf) if starts_sustained else (0.0, rate_per_s)


def _num_failed(records: Iterable[RequestRecord]) -> int:
    return sum(record.status in ("refused", "error") for record in records)


def _largest_but(num_left_out: int, values: list[float]) -> float | None:
    """The largest value when so many larger ones are left out; None if it is infinite, or none."""
    if len(values) <= num_left_out:
        return None
    value = sorted(values)[-1 - num_left_out]
    return value if math.isfinite(value) else None
