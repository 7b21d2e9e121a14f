"""Scores runs: by goodput, and between equals by the tails."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.summary import Slos, Summary

_HEADROOM_SHARE = 0.01


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Mean figures over one candidate's runs.

    Attributes:
        goodput_per_s: requests a second that attained their SLO.
        attainment: fraction of all requests that did.
        score: the goodput, and at most a hundredth more for tails far below their SLOs.
        score_error: standard error of the score's mean over runs; 0 of a single run.
        saturated_tokens_per_s: prompt and output tokens under a load beyond capacity; None if not
            tried.
    """

    goodput_per_s: float
    attainment: float
    itl_p99_s: float
    ttft_p99_s: float
    score: float
    score_error: float = 0.0
    saturated_tokens_per_s: float | None = None

    @classmethod
    def mean(cls, summaries: Sequence[Summary], slos: Slos) -> "Figures":
        """Return the mean of runs that differ in their random numbers."""
        scores = [score(summary, slos) for summary in summaries]
        error = np.std(scores, ddof=1) / np.sqrt(len(scores)) if len(scores) > 1 else 0.0
        return cls(
            goodput_per_s=_mean(summary.goodput_per_s for summary in summaries),
            attainment=_mean(summary.attainment for summary in summaries),
            itl_p99_s=_mean(summary.itl_s.p99 for summary in summaries if summary.itl_s),
            ttft_p99_s=_mean(summary.ttft_s.p99 for summary in summaries if summary.ttft_s),
            score=_mean(scores),
            score_error=float(error),
        )


def score(summary: Summary, slos: Slos) -> float:
    """Return `Figures.score` of one run."""
    return summary.goodput_per_s * (1.0 + _HEADROOM_SHARE * _headroom(summary, slos))


def attained(records: Sequence[RequestRecord], slos: Slos) -> np.ndarray:
    """Return which requests attained their SLO: bool [N]."""
    return np.array([slos.are_met(record) for record in records], dtype=bool)


def _headroom(summary: Summary, slos: Slos) -> float:
    """Return how far the tails are below the SLOs of requests without a class, in [0, 1]."""
    limits_s = (slos.default.itl_s, slos.default.tpot_s, slos.default.ttft_s)
    tails = (summary.itl_s, summary.tpot_s, summary.ttft_s)
    used = [
        1.0 if tail is None else min(1.0, tail.p99 / limit_s)
        for tail, limit_s in zip(tails, limits_s, strict=True)
        if limit_s is not None
    ]
    return 1.0 - _mean(used) if used else 0.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else float("inf")
