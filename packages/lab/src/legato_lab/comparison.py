"""Compares two runs, and tells their differences from chance."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np

from legato_lab.bootstrap import interval, resampled
from legato_lab.report.report_file import Report, RunReport
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.summary import Summary

_NUM_RESAMPLES = 1000
_QUANTILES = (0.5, 0.99)
_LEAST = 0.01  # a smaller difference does not matter

Unit = Literal["share", "per second", "seconds"]
Figures = dict[str, float]
"""Key the figure's name, as in `_UNITS`; figures that a run lacks are left out."""

_LATENCIES: dict[str, Callable[[RequestRecord], float | None]] = {
    "TTFT": lambda record: record.ttft_s,
    "TPOT": lambda record: record.tpot_s,
    "E2E": lambda record: record.e2e_s,
}
_OF_SLOS = ("SLO attained", "goodput, requests/s")
_UNITS: dict[str, Unit] = {
    "finished": "share",
    "requests/s": "per second",
    "output tokens/s": "per second",
    "total tokens/s": "per second",
    **{
        f"{latency} {which}": "seconds"
        for latency in ("TTFT", "ITL", "TPOT", "E2E")
        for which in ("p50", "p99", "max")
    },
    "SLO attained": "share",
    "goodput, requests/s": "per second",
}


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of two runs.

    Attributes:
        first, second: None if a run lacks it.
        relative: change from the first to the second; -0.1 is 10 % less. None if undefined.
        low, high: interval of 95 % of the resamples; None if they tell nothing, as for maxima.
    """

    name: str
    unit: Unit
    first: float | None
    second: float | None
    relative: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def is_sure(self) -> bool:
        """Whether the difference exceeds the noise within a run, and is large enough to matter."""
        if self.relative is None or self.low is None or self.high is None:
            return False
        return abs(self.relative) >= _LEAST and not self.low <= 0.0 <= self.high

    @property
    def is_better(self) -> bool:
        """Whether the second run has the better figure, even if by chance."""
        is_higher = self.relative is not None and self.relative > 0.0
        return is_higher != (self.unit == "seconds")


class Unlike(msgspec.Struct, frozen=True):
    """Something in which two runs differ."""

    name: str
    first: str
    second: str


def compare(first: RunReport, second: RunReport, seed: int = 0) -> list[Difference]:
    """Compare every figure of two runs; the second's is relative to the first's.

    The requests of each run are resampled. If both runs served the same requests, each is drawn
    together with its results in both, so that what is hard for both cancels out. Resampling does
    not see noise that affects a whole run: a slow minute of the machine, or chance that a saturated
    queue carries on.
    """
    ours, theirs = _figures(first.summary), _figures(second.summary)
    seeds = (seed, seed if _lengths(first) == _lengths(second) else seed + 1)
    resamples = zip(_resamples(first, seeds[0]), _resamples(second, seeds[1]), strict=True)
    relatives: dict[str, list[float]] = {name: [] for name in _UNITS}
    for our_draw, their_draw in resamples:
        for name in our_draw.keys() & their_draw.keys():
            relatives[name].append(_relative(our_draw[name], their_draw[name]))
    are_promised = first.slos.promise_anything and second.slos.promise_anything
    return [
        _difference(name, ours.get(name), theirs.get(name), relatives[name])
        for name in _UNITS
        if are_promised or name not in _OF_SLOS
    ]


def unlike_settings(first: Report, second: Report) -> list[Unlike]:
    """Return the settings in which two runs differ."""
    names = sorted(first.settings.keys() | second.settings.keys())
    values = [(n, str(first.settings.get(n)), str(second.settings.get(n))) for n in names]
    return [Unlike(name, one, other) for name, one, other in values if one != other]


def unlike_requests(first: RunReport, second: RunReport, name: str) -> list[Unlike]:
    """Describe the requests of two runs, unless those of one begin with those of the other."""
    ours, theirs = _lengths(first), _lengths(second)
    num_common = min(len(ours), len(theirs))
    if ours[:num_common] == theirs[:num_common]:
        return []
    return [Unlike(f"{name}: requests", _describe(ours), _describe(theirs))]


def _figures(summary: Summary) -> Figures:
    counts = summary.num_requests
    figures = {
        "finished": counts.get("ok", 0) / max(1, sum(counts.values())),
        "requests/s": summary.requests_per_s,
        "output tokens/s": summary.output_tokens_per_s,
        "total tokens/s": summary.total_tokens_per_s,
        "SLO attained": summary.attainment,
        "goodput, requests/s": summary.goodput_per_s,
    }
    latencies = {
        "TTFT": summary.ttft_s,
        "ITL": summary.itl_s,
        "TPOT": summary.tpot_s,
        "E2E": summary.e2e_s,
    }
    for name, values in latencies.items():
        if values is not None:
            for which in ("p50", "p99", "max"):
                figures[f"{name} {which}"] = getattr(values, which)
    return figures


def _resamples(report: RunReport, seed: int) -> "list[Figures]":
    """Return the figures of each resample, without maxima, which resampling cannot judge.

    A request is drawn with its neighbours, in groups of the square root of their number.
    """
    records = report.records
    num = len(records)
    if not num:
        return [{}] * _NUM_RESAMPLES
    is_ok = np.array([record.status == "ok" for record in records])
    num_output = is_ok * [record.num_tokens for record in records]
    num_prompt = is_ok * [record.request.num_prompt_tokens for record in records]
    is_met = np.array([report.slos.are_met(record) for record in records])
    arrivals_s = np.array([record.request.arrival_s for record in records])
    ends_s = np.array([record.last_event_s for record in records])
    pools = _pools(records)
    found = []
    for picks in resampled(
        num, num_resamples=_NUM_RESAMPLES, seed=seed, num_together=math.isqrt(num)
    ):
        times = np.bincount(picks, minlength=num)
        duration_s = max(float(ends_s[picks].max() - arrivals_s[picks].min()), 1e-9)
        figures = {
            "finished": times @ is_ok / num,
            "requests/s": times @ is_ok / duration_s,
            "output tokens/s": times @ num_output / duration_s,
            "total tokens/s": times @ (num_output + num_prompt) / duration_s,
            "SLO attained": times @ is_met / num,
            "goodput, requests/s": times @ is_met / duration_s,
        }
        for name, pool in pools.items():
            figures |= {f"{name} {which}": value for which, value in pool.quantiles(times)}
        found.append(figures)
    return found


class _Pool:
    """Values of requests, of any number each.

    Args:
        values: [N].
        owners: the request of each value: int [N].
    """

    def __init__(self, values: np.ndarray, owners: np.ndarray) -> None:
        order = np.argsort(values)
        self._values, self._owners = values[order], owners[order]

    def quantiles(self, times: np.ndarray) -> list[tuple[str, float]]:
        """Return `p50` and `p99` with each request weighted: int [requests]."""
        cumulated = np.cumsum(times[self._owners])
        if not cumulated.size or cumulated[-1] == 0:
            return []
        places = np.searchsorted(cumulated, np.array(_QUANTILES) * cumulated[-1])
        return list(zip(("p50", "p99"), self._values[places].tolist(), strict=True))


def _pools(records: Sequence[RequestRecord]) -> dict[str, _Pool]:
    """Return the latencies of the requests that finished; key the latency's name."""
    finished = [(owner, record) for owner, record in enumerate(records) if record.status == "ok"]
    pools = {}
    for name, latency in _LATENCIES.items():
        known = [(owner, latency(record)) for owner, record in finished]
        pairs = [(owner, value) for owner, value in known if value is not None]
        pools[name] = _Pool(
            np.array([value for _, value in pairs]),
            np.array([owner for owner, _ in pairs], dtype=np.int64),
        )
    gaps = [record.itl_s for _, record in finished]
    owners = np.repeat([owner for owner, _ in finished], [len(itl_s) for itl_s in gaps])
    pools["ITL"] = _Pool(np.concatenate([np.empty(0), *gaps]), owners.astype(np.int64))
    return pools


def _difference(
    name: str, first: float | None, second: float | None, relatives: Sequence[float]
) -> Difference:
    known = np.array(relatives)[np.isfinite(relatives)] if relatives else np.empty(0)
    low, high = interval(known) if known.size else (None, None)
    relative = None if first is None or second is None else _relative(first, second)
    return Difference(
        name=name,
        unit=_UNITS[name],
        first=first,
        second=second,
        relative=relative if relative is not None and math.isfinite(relative) else None,
        low=low,
        high=high,
    )


def _relative(first: float, second: float) -> float:
    if first == second:
        return 0.0
    return (second - first) / first if first else math.inf


def _lengths(report: RunReport) -> list[tuple[int, int, str | None]]:
    requests = [record.request for record in report.records]
    return [(r.num_prompt_tokens, r.num_output_tokens, r.slo_class) for r in requests]


def _describe(lengths: Sequence[tuple[int, int, str | None]]) -> str:
    prompt, output = (np.mean([length[index] for length in lengths]) for index in (0, 1))
    return f"{len(lengths)}, mean {prompt:.0f} + {output:.0f} tokens"
