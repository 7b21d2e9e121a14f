"""Tells a better run from a luckier one."""

from collections.abc import Sequence

import msgspec
import numpy as np

from legato_lab.bootstrap import interval, resampled
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.summary import Slos, summarize
from legato_lab.tune.score import attained

_NUM_RESAMPLES = 2000


class Lead(msgspec.Struct, frozen=True, kw_only=True):
    """How much higher the first of two runs' goodput was.

    Attributes:
        of_goodput: relative to the second; 0.05 is 5 % more.
        low, high: interval of 95 % of the resamples.
        probability: share of the resamples in which the first run leads; ties count half.
    """

    of_goodput: float
    low: float
    high: float
    probability: float

    @property
    def is_sure(self) -> bool:
        """Whether the lead exceeds the noise."""
        return self.low > 0.0


def lead(
    first: Sequence[RequestRecord], second: Sequence[RequestRecord], slos: Slos, seed: int
) -> Lead:
    """Compare runs of the same requests by a paired bootstrap.

    The requests are resampled, each with its results in both runs, so that what is hard for both
    cancels out. Resampling does not see noise that affects a whole run, such as a slow minute of
    the machine.
    """
    goodputs = []
    picks = resampled(len(first), num_resamples=_NUM_RESAMPLES, seed=seed)
    for records in (first, second):
        duration_s = summarize(records, slos).duration_s
        met = attained(records, slos)
        everyone = np.vstack([met, met[picks]])  # [1 + resamples, requests]
        goodputs.append(everyone.sum(axis=1) / duration_s)
    ours, theirs = goodputs
    leads = (ours - theirs) / np.maximum(theirs, 1e-9)
    low, high = interval(leads[1:])
    wins = np.mean(ours[1:] > theirs[1:]) + 0.5 * np.mean(ours[1:] == theirs[1:])
    return Lead(of_goodput=float(leads[0]), low=low, high=high, probability=float(wins))
