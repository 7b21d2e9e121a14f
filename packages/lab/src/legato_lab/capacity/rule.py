"""Judges whether a trial's rate is sustained, at its end or as soon as it is certain."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from legato.core.slo import P99
from legato_lab.capacity.trial import Load, Trial
from legato_lab.capacity.unloaded import UnloadedTtft
from legato_lab.simulation.record import RequestRecord, gaps_s
from legato_lab.simulation.workload import Workload

# The least number of gaps or requests for one late, delayed or failed.
_GAPS_PER_LATE = 100
_REQUESTS_PER_DELAYED = 2
_REQUESTS_PER_FAILED = 100
# Shares of the longest delay, and of the time that a delay had to grow: a smaller growth may be
# chance.
_MAX_GROWTH = 0.5
_MAX_GROWTH_RATE = 0.01
# Standard deviations of the number of arrivals, which is Poisson.
_BEHIND = 2.0
_FAR_BEHIND = 4.0


class _Seen(msgspec.Struct, frozen=True):
    """Counts of what breaks a rule, of one or several measured requests."""

    num_late: int = 0
    num_unattained: int = 0
    num_delayed: int = 0
    num_failed: int = 0

    def __add__(self, other: "_Seen") -> "_Seen":
        return _Seen(
            self.num_late + other.num_late,
            self.num_unattained + other.num_unattained,
            self.num_delayed + other.num_delayed,
            self.num_failed + other.num_failed,
        )


class CapacityRule(msgspec.Struct, frozen=True, kw_only=True):
    """The rule for when a rate is sustained.

    Attributes:
        itl_slo_s: at most one gap in 100 is longer, or as many as `itl_slo_quantile` leaves.
        least_attainment: the share of requests that must each keep the ITL SLO; None judges the
            gaps of all requests together, which excuses rare long ones.
        max_delay_s: at most half of the scheduling delays are longer.
    """

    itl_slo_s: float
    itl_slo_quantile: float = P99
    least_attainment: float | None = None
    max_delay_s: float = 2.0
    unloaded: UnloadedTtft

    def judge(self, load: Load, records: Sequence[RequestRecord]) -> Trial:
        """Return the verdict on a trial that has ended.

        At most one request in 100 may fail. The median delay must not grow: it does if it rises
        from quarter to quarter, and that of the second half exceeds that of the first by half of
        `max_delay_s` and by 1 % of the time between. Such growth is a queue; a burst goes down
        again. And requests must not end more slowly than they arrive, beyond noise.
        """
        measured = _measured(load, records)
        itl_s = gaps_s(measured).tolist()
        delays_s = [self._delay_at_end_s(load, record) for record in measured]
        seen = [self._see(r, len(r.itl_s), d) for r, d in zip(measured, delays_s, strict=True)]
        counts = sum(seen, _Seen())
        first_s, second_s = _medians_of_parts(load, measured, delays_s, 2)
        growth_s = None if first_s is None or second_s is None else second_s - first_s
        broken = self._broken(counts, len(measured), len(itl_s))
        most_s = max(_MAX_GROWTH * self.max_delay_s, _MAX_GROWTH_RATE * load.measured_s / 2)
        quarters_s = _medians_of_parts(load, measured, delays_s, 4)
        if growth_s is not None and growth_s > most_s and _ascend(quarters_s):
            broken.append("delay grows")
        if _num_behind(load, records) > _BEHIND * math.sqrt(len(measured)):
            broken.append("falls behind")
        finished = [r for r in records if r.status == "ok" and _left(load, r)]
        measured_s = load.measured_s if not broken else _ran_s(load, records)
        e2e_s = [r.e2e_s for r in measured if r.status == "ok" and r.e2e_s is not None]
        return Trial(
            load=load,
            measured_s=measured_s,
            num_requests=len(measured),
            num_failed=counts.num_failed,
            finished_per_s=len(finished) / measured_s,
            p99_itl_s=_largest_but(len(itl_s) // _GAPS_PER_LATE, itl_s),
            longest_itl_s=max(itl_s, default=None),
            attainment=1.0 - counts.num_unattained / max(1, len(measured)),
            median_delay_s=_median(delays_s),
            delay_growth_s=growth_s,
            median_e2e_s=_median(e2e_s),
            broken=broken,
        )

    def is_broken(self, seen: _Seen, num_requests: int, num_gaps: int) -> bool:
        """Args: num_requests, num_gaps: totals of the trial."""
        return bool(self._broken(seen, num_requests, num_gaps))

    def observe(self, record: RequestRecord, now_s: float) -> _Seen:
        """Return what is already certain of a request, which may be in flight."""
        ttft_s = now_s - record.request.arrival_s if record.ttft_s is None else record.ttft_s
        num_gaps = record.request.num_output_tokens - 1
        return self._see(record, num_gaps, self._beyond_unloaded_s(record, ttft_s))

    def _see(self, record: RequestRecord, num_gaps: int, delay_s: float) -> _Seen:
        num_late = int((record.itl_s > self.itl_slo_s).sum())
        return _Seen(
            num_late=num_late,
            num_unattained=_has_failed(record) or num_late > self._num_allowed(num_gaps),
            num_delayed=delay_s > self.max_delay_s,
            num_failed=_has_failed(record),
        )

    def _broken(self, seen: _Seen, num_requests: int, num_gaps: int) -> list[str]:
        if self.least_attainment is None:
            is_late = seen.num_late > self._num_allowed(num_gaps)
        else:
            is_late = seen.num_unattained > _share(num_requests, 1.0 - self.least_attainment)
        found = {
            "ITL" if self.least_attainment is None else "attainment": is_late,
            "delay": seen.num_delayed > num_requests // _REQUESTS_PER_DELAYED,
            "failures": seen.num_failed > num_requests // _REQUESTS_PER_FAILED,
        }
        return [name for name, is_broken in found.items() if is_broken]

    def _num_allowed(self, num_gaps: int) -> int:
        """Return the number of gaps that may be late."""
        return _share(num_gaps, 1.0 - self.itl_slo_quantile)

    def _delay_at_end_s(self, load: Load, record: RequestRecord) -> float:
        """Return the scheduling delay so far; infinite if there will be no first token."""
        if record.ttft_s is not None:
            return self._beyond_unloaded_s(record, record.ttft_s)
        if _has_failed(record):
            return math.inf
        return self._beyond_unloaded_s(record, load.end_s - record.request.arrival_s)

    def _beyond_unloaded_s(self, record: RequestRecord, ttft_s: float) -> float:
        return ttft_s - self.unloaded.at(record.request.num_prompt_tokens)


class TrialWatch:
    """Detects when a running trial can no longer be sustained.

    A trial is also lost once requests lag further behind their arrivals than chance explains. Each
    record is looked at only until its request ends, since there are many records.

    Args:
        workload: of the trial.
    """

    def __init__(self, rule: CapacityRule, load: Load, workload: Workload) -> None:
        measured = [r for r in workload if r.arrival_s >= load.warm_up_s]
        self._rule = rule
        self._load = load
        self._num_requests = len(measured)
        self._num_gaps = sum(request.num_output_tokens - 1 for request in measured)
        self._ended: dict[int, _Seen] = {}  # key: place among the records

    def is_lost(self, now_s: float, records: Sequence[RequestRecord]) -> bool:
        """Args: records: of the requests sent so far, always in the same order."""
        seen = sum(self._ended.values(), _Seen())
        for place, record in enumerate(records):
            if place in self._ended or record.request.arrival_s < self._load.warm_up_s:
                continue
            found = self._rule.observe(record, now_s)
            seen += found
            if record.status != "cancelled":
                self._ended[place] = found
        num_tolerated = _FAR_BEHIND * math.sqrt(self._num_requests)
        return (
            self._rule.is_broken(seen, self._num_requests, self._num_gaps)
            or _num_behind(self._load, records) > num_tolerated
        )


def _num_behind(load: Load, records: Iterable[RequestRecord]) -> int:
    """Return arrivals minus departures during the measured part, so far."""
    num_arrived = num_left = 0
    for record in records:
        num_arrived += record.request.arrival_s >= load.warm_up_s
        num_left += _left(load, record)
    return num_arrived - num_left


def _left(load: Load, record: RequestRecord) -> bool:
    """Whether a request ended within the measured part."""
    return record.status != "cancelled" and load.warm_up_s <= record.last_event_s <= load.end_s


def _ran_s(load: Load, records: Iterable[RequestRecord]) -> float:
    """Return the length of the measured part of a trial that may have been ended early."""
    last_s = max((record.last_event_s for record in records), default=load.end_s)
    return min(max(last_s - load.warm_up_s, 1.0), load.measured_s)


def _measured(load: Load, records: Iterable[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.request.arrival_s >= load.warm_up_s]


def _medians_of_parts(
    load: Load, measured: Sequence[RequestRecord], delays_s: Sequence[float], num_parts: int
) -> list[float | None]:
    """Return the median delay of requests by the part of the time in which they arrived."""
    parts: list[list[float]] = [[] for _ in range(num_parts)]
    for record, delay_s in zip(measured, delays_s, strict=True):
        passed = (record.request.arrival_s - load.warm_up_s) / load.measured_s
        parts[min(num_parts - 1, int(passed * num_parts))].append(delay_s)
    return list(map(_median, parts))


def _ascend(values: Sequence[float | None]) -> bool:
    """Whether each known value is larger than the one before."""
    known = [value for value in values if value is not None]
    return all(low < high for low, high in pairwise(known))


def _has_failed(record: RequestRecord) -> bool:
    return record.status in ("refused", "error")


def _share(count: int, share: float) -> int:
    """Return a share rounded down, except for float errors."""
    return int(round(count * share, 6))


def _median(values: Sequence[float]) -> float | None:
    """Return the lower median: half of the values do not exceed it."""
    return _largest_but(len(values) // _REQUESTS_PER_DELAYED, values)


def _largest_but(num_left_out: int, values: Sequence[float]) -> float | None:
    """Return the largest value after leaving out some; None if it is infinite or there is none."""
    if len(values) <= num_left_out:
        return None
    value = float(np.sort(values)[-1 - num_left_out])
    return value if math.isfinite(value) else None
