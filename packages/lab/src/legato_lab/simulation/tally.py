"""Computes the figures of a run without keeping its records, which may be too many."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

from legato.observe.distribution import Distribution
from legato_lab.simulation.record import RequestRecord, Status
from legato_lab.simulation.summary import Slos, Summary

_LEAST_S, _MOST_S = 1e-6, 1e6
_STEP = math.log(1.01)
_NUM_BINS = math.ceil(math.log(_MOST_S / _LEAST_S) / _STEP) + 1
_BUFFERED = 1 << 16


class Histogram:
    """Counts of seconds in bins; each bin ends 1 % above the one before."""

    def __init__(self) -> None:
        self._counts = np.zeros(_NUM_BINS, dtype=np.int64)
        self._sum_s = self._max_s = 0.0
        self._buffer = array("d")

    def add(self, values_s: Iterable[float] | np.ndarray) -> None:
        """Count all values."""
        if isinstance(values_s, np.ndarray):
            self._buffer.frombytes(values_s.astype(np.float64, copy=False).tobytes())
        else:
            self._buffer.extend(values_s)
        if len(self._buffer) >= _BUFFERED:
            self._flush()

    def distribution(self) -> Distribution | None:
        """Return percentiles within 1 %, exact mean and maximum; None without values."""
        self._flush()
        num_values = int(self._counts.sum())
        if not num_values:
            return None
        ranks = np.array([0.5, 0.9, 0.95, 0.99]) * (num_values - 1)
        low_s, high_s = self._values_s(np.floor(ranks)), self._values_s(np.ceil(ranks))
        p50, p90, p95, p99 = (low_s + (ranks % 1.0) * (high_s - low_s)).tolist()
        return Distribution(self._sum_s / num_values, p50, p90, p95, p99, self._max_s)

    def _values_s(self, ranks: np.ndarray) -> np.ndarray:
        """Return the values at these ranks, counted from 0, of all values in order."""
        bins = np.searchsorted(self._counts.cumsum(), ranks, side="right")
        values_s: np.ndarray = np.minimum(_LEAST_S * np.exp(_STEP * bins), self._max_s)
        return values_s

    def _flush(self) -> None:
        if not self._buffer:
            return
        values_s = np.array(self._buffer)
        del self._buffer[:]
        self._sum_s += float(values_s.sum())
        self._max_s = max(self._max_s, float(values_s.max()))
        # The middle of a bin stands for its values.
        bins = np.rint(np.log(np.clip(values_s, _LEAST_S, _MOST_S) / _LEAST_S) / _STEP)
        self._counts += np.bincount(bins.astype(np.int64), minlength=_NUM_BINS)


class _Part:
    """Sums over some of the requests."""

    def __init__(self) -> None:
        self.num_requests: Counter[Status] = Counter()
        self.num_attained = 0
        self.num_prompt = self.num_output = self.num_told = self.num_cached = 0  # tokens
        self.ttft_s, self.itl_s, self.tpot_s, self.e2e_s = (Histogram() for _ in range(4))

    def add(self, record: RequestRecord, *, is_met: bool) -> None:
        self.num_requests[record.status] += 1
        self.num_attained += is_met
        if record.status != "ok":
            return
        self.num_prompt += record.request.num_prompt_tokens
        self.num_output += record.num_tokens
        if record.num_cached_tokens is not None:
            self.num_told += record.request.num_prompt_tokens
            self.num_cached += record.num_cached_tokens
        self.itl_s.add(record.itl_s)
        for histogram, value_s in (
            (self.ttft_s, record.ttft_s),
            (self.tpot_s, record.tpot_s),
            (self.e2e_s, record.e2e_s),
        ):
            if value_s is not None:
                histogram.add((value_s,))

    def summary(self, duration_s: float) -> Summary:
        def per_s(count: int) -> float:
            return count / duration_s if duration_s > 0.0 else 0.0

        return Summary(
            num_requests=dict(self.num_requests),
            duration_s=duration_s,
            requests_per_s=per_s(self.num_requests["ok"]),
            output_tokens_per_s=per_s(self.num_output),
            total_tokens_per_s=per_s(self.num_prompt + self.num_output),
            ttft_s=self.ttft_s.distribution(),
            itl_s=self.itl_s.distribution(),
            tpot_s=self.tpot_s.distribution(),
            e2e_s=self.e2e_s.distribution(),
            attainment=self.num_attained / max(1, self.num_requests.total()),
            goodput_per_s=per_s(self.num_attained),
            cached_share=self.num_cached / self.num_told if self.num_told else None,
        )


class Tally:
    """Takes records one by one, and makes the figures of `summarize`, with percentiles within 1 %.

    Attributes:
        failures: number of requests by error.
    """

    def __init__(self, slos: Slos) -> None:
        self.slos = slos
        self.failures: Counter[str] = Counter()
        self._all = _Part()
        self._by_class: dict[str, _Part] = {}
        self._start_s, self._end_s = math.inf, 0.0

    def add(self, record: RequestRecord) -> None:
        """Count a request that has ended, or was cancelled."""
        is_met = self.slos.are_met(record)
        self._start_s = min(self._start_s, record.request.arrival_s)
        self._end_s = max(self._end_s, record.last_event_s)
        if record.error is not None:
            self.failures[record.error] += 1
        self._all.add(record, is_met=is_met)
        if record.request.slo_class is not None:
            self._by_class.setdefault(record.request.slo_class, _Part()).add(record, is_met=is_met)

    def summary(self) -> Summary:
        """Return figures as `summarize`."""
        return self._all.summary(self._duration_s)

    def by_class(self) -> dict[str, Summary]:
        """Return figures as `summarize_classes`."""
        return {
            name: self._by_class[name].summary(self._duration_s) for name in sorted(self._by_class)
        }

    @property
    def _duration_s(self) -> float:
        return max(0.0, self._end_s - self._start_s) if self._all.num_requests else 0.0
