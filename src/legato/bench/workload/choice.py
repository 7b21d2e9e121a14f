"""Which workload to run, as a user chooses it."""

from pathlib import Path
from typing import Literal

import msgspec

from legato.bench.workload.mixes import MIXES, draw_mix
from legato.bench.workload.quantiles import are_quantiles, draw_quantiles
from legato.bench.workload.requests import (
    Workload,
    cut_to,
    mean_rate_per_s,
    rescaled,
    with_poisson_arrivals,
    within,
)
from legato.bench.workload.traces import read_workload
from legato.core.errors import ConfigError

Arrivals = Literal["trace", "poisson"]
_NUM_DRAWN = 100


class WorkloadChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a workload.

    Attributes:
        source: a file, a key of `MIXES`, or quantiles.
        num_requests: how many of its requests; None takes a file's all, and 100 of what is drawn.
        rate_per_s: None takes the file's own; requests that are drawn then all arrive at once.
        arrivals: the file's own pattern or a random one; None takes the file's, and of what is
            drawn a random one.
        duration_s: leaves out what arrives later.
        max_model_len: longest prompt plus output in tokens; None cuts nothing.
    """

    source: str
    num_requests: int | None = None
    rate_per_s: float | None = None
    arrivals: Arrivals | None = None
    duration_s: float | None = None
    max_model_len: int | None = None
    seed: int = 0

    def load(self) -> Workload:
        """The requests that were chosen, arriving as they were chosen to.

        Raises:
            ConfigError: there is no such file or mix, the file is malformed, or nothing is left.
        """
        workload = self._arriving(self._drawn())
        if self.duration_s is not None:
            workload = within(workload, self.duration_s)
        if not workload:
            raise ConfigError("the workload has no requests")
        return workload if self.max_model_len is None else cut_to(workload, self.max_model_len)

    def at_poisson_rate(self, rate_per_s: float) -> Workload:
        """The same requests as a trial of a capacity, in which they arrive at random.

        Raises:
            ConfigError: as `load`, or they were chosen to arrive otherwise.
        """
        if self.arrivals == "trace":
            raise ConfigError("a capacity is that for Poisson arrivals, not for those of a trace")
        return msgspec.structs.replace(self, rate_per_s=rate_per_s, arrivals="poisson").load()

    def _drawn(self) -> Workload:
        num_drawn = self.num_requests or _NUM_DRAWN
        if self.source in MIXES:
            return draw_mix(self.source, num_drawn, self.seed)
        if are_quantiles(self.source):
            return draw_quantiles(self.source, num_drawn, self.seed)
        path = Path(self.source)
        if not path.exists():
            raise ConfigError(f"no file or mix {self.source!r}; mixes are: {', '.join(MIXES)}")
        return read_workload(path)[: self.num_requests]

    def _arriving(self, workload: Workload) -> Workload:
        is_drawn = self.source in MIXES or are_quantiles(self.source)
        is_random = self.arrivals == "poisson" or (self.arrivals is None and is_drawn)
        if is_random:
            rate_per_s = self.rate_per_s or mean_rate_per_s(workload)
            return with_poisson_arrivals(workload, rate_per_s, self.seed)
        return workload if self.rate_per_s is None else rescaled(workload, self.rate_per_s)
