"""Which workload to run, as a user chooses it."""

from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from legato.bench.workload.mixes import MIXES, draw_mix
from legato.bench.workload.quantiles import are_quantiles, draw_quantiles
from legato.bench.workload.requests import (
    Workload,
    cut_to,
    from_time,
    mean_rate_per_s,
    rescaled,
    stretched,
    with_poisson_arrivals,
    within,
)
from legato.bench.workload.traces import read_workload
from legato.bench.workload.trials import TrialSource
from legato.core.errors import ConfigError

Arrivals = Literal["trace", "poisson"]
_NUM_DRAWN = 100
_NUM_DRAWN_FOR_TRIALS = 5000


class WorkloadChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a workload.

    Attributes:
        source: a file, a key of `MIXES`, or quantiles.
        start_at_s: leaves out what a file has before.
        num_requests: how many of its requests, from there on; None takes a file's all, and 100 of
            what is drawn.
        sample: so many of these, drawn at random; they keep their order and their arrivals.
        rate_per_s: None takes the file's own; requests that are drawn then all arrive at once.
        time_scale: stretches a file's own arrivals; 2 halves their rate.
        arrivals: the file's own pattern or a random one; None takes the file's, and of what is
            drawn a random one.
        duration_s: leaves out what arrives later.
        max_model_len: longest prompt plus output in tokens; None cuts nothing.
    """

    source: str
    start_at_s: float = 0.0
    num_requests: int | None = None
    sample: int | None = None
    rate_per_s: float | None = None
    time_scale: float | None = None
    arrivals: Arrivals | None = None
    duration_s: float | None = None
    max_model_len: int | None = None
    seed: int = 0

    def load(self) -> Workload:
        """The requests that were chosen, arriving as they were chosen to.

        Raises:
            ConfigError: there is no such file or mix, the file is malformed, nothing is left, or
                what was chosen contradicts itself.
        """
        workload = self._arriving(self._sampled(self._drawn(self.num_requests or _NUM_DRAWN)))
        if self.duration_s is not None:
            workload = within(workload, self.duration_s)
        if not workload:
            raise ConfigError("the workload has no requests")
        return workload if self.max_model_len is None else cut_to(workload, self.max_model_len)

    def trials(self) -> TrialSource:
        """The same requests for trials of a capacity, in which they arrive at random.

        Raises:
            ConfigError: as `load`, or they were chosen to arrive otherwise.
        """
        if self.arrivals == "trace" or self.time_scale is not None:
            raise ConfigError("a capacity is that for Poisson arrivals, not for those of a trace")
        workload = self._sampled(self._drawn(self.num_requests or _NUM_DRAWN_FOR_TRIALS))
        cut = workload if self.max_model_len is None else cut_to(workload, self.max_model_len)
        return TrialSource(cut)

    @property
    def _is_drawn(self) -> bool:
        return self.source in MIXES or are_quantiles(self.source)

    def _drawn(self, num_drawn: int) -> Workload:
        """Args: num_drawn: of what is not a file."""
        if self._is_drawn and (self.start_at_s > 0.0 or self.time_scale is not None):
            raise ConfigError("only a file has arrivals to start at or to stretch")
        if self.source in MIXES:
            return draw_mix(self.source, num_drawn, self.seed)
        if are_quantiles(self.source):
            return draw_quantiles(self.source, num_drawn, self.seed)
        path = Path(self.source)
        if not path.exists():
            raise ConfigError(f"no file or mix {self.source!r}; mixes are: {', '.join(MIXES)}")
        return from_time(read_workload(path), self.start_at_s)[: self.num_requests]

    def _sampled(self, workload: Workload) -> Workload:
        if self.sample is None:
            return workload
        if self.sample > len(workload):
            raise ConfigError(f"a sample of {self.sample} of only {len(workload)} requests")
        places = np.random.default_rng(self.seed).choice(len(workload), self.sample, replace=False)
        return [workload[place] for place in np.sort(places)]

    def _arriving(self, workload: Workload) -> Workload:
        if self.time_scale is not None:
            if self.rate_per_s is not None:
                raise ConfigError("a rate and a time scale both say how far to stretch arrivals")
            workload = stretched(workload, self.time_scale)
        is_random = self.arrivals == "poisson" or (self.arrivals is None and self._is_drawn)
        if is_random:
            rate_per_s = self.rate_per_s or mean_rate_per_s(workload)
            return with_poisson_arrivals(workload, rate_per_s, self.seed)
        return workload if self.rate_per_s is None else rescaled(workload, self.rate_per_s)
