"""The user's choice of a workload."""

import math
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from legato.core.errors import ConfigError
from legato_lab.simulation.workload import (
    Workload,
    from_time,
    mean_rate_per_s,
    rescaled,
    stretched,
    with_poisson_arrivals,
    within,
)
from legato_lab.workload.formats.rows import WorkloadFile
from legato_lab.workload.mixes import MIXES, draw_mix
from legato_lab.workload.notes import WorkloadNotes
from legato_lab.workload.quantiles import are_quantiles, draw_quantiles
from legato_lab.workload.too_long import TooLong, TooLongAction, fit_into
from legato_lab.workload.traces import Reading, read_file
from legato_lab.workload.trials import TrialSource

Arrivals = Literal["trace", "poisson"]
_NUM_DRAWN = 100
_NUM_DRAWN_FOR_TRIALS = 5000


class WorkloadChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a workload.

    Attributes:
        source: a file, a key of `MIXES`, or quantiles.
        start_at_s: skips a file's earlier requests.
        num_requests: how many requests, from there on; None means all of a file, or 100 drawn ones.
        sample: this many of them, drawn at random; they keep their order and their arrivals.
        rate_per_s: None keeps a file's own; drawn requests then all arrive at once.
        time_scale: stretches a file's own arrivals; 2 halves their rate.
        arrivals: the file's own pattern or a random one; None means the file's, or a random one if
            it has none.
        duration_s: leaves later arrivals out.
        max_model_len: longest prompt plus output in tokens; None allows any.
        too_long: how to treat longer requests; None refuses a file's and cuts drawn ones. It
            applies to all chosen requests, before `duration_s` leaves any out.
        reading: of a file.
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
    too_long: TooLongAction | None = None
    reading: Reading = Reading()
    seed: int = 0

    def load(self) -> Workload:
        """Return the chosen requests, with their arrivals.

        Raises:
            ConfigError: there is no such file or mix, the file is malformed, requests are too long
                and must not be cut or dropped, nothing is left, or the settings contradict each
                other.
        """
        workload = self._arriving(self._chosen()[0])
        if self.duration_s is not None:
            workload = within(workload, self.duration_s)
        if not workload:
            raise ConfigError("the workload has no requests")
        return workload

    def notes(self) -> WorkloadNotes:
        """Return what was left out or shortened of the chosen requests; raises as `load`."""
        too_long = self._chosen()[1]
        if self._is_drawn:
            return WorkloadNotes(too_long=too_long)
        file = self._file()
        return WorkloadNotes(
            too_long=too_long,
            num_bad_rows=file.num_bad_rows,
            first_bad_row=file.first_bad_row,
            num_unanswered=file.num_unanswered,
        )

    def for_trials(self) -> "WorkloadChoice":
        """Return the choice for the trials of a capacity search, which have their own lengths."""
        num_requests = _NUM_DRAWN_FOR_TRIALS if self._is_drawn else None
        return msgspec.structs.replace(self, num_requests=num_requests, duration_s=None)

    def trials(self) -> TrialSource:
        """Return the requests that trials draw from, with random arrivals.

        Raises:
            ConfigError: as `load`, or other arrivals were chosen.
        """
        if self.arrivals == "trace" or self.time_scale is not None:
            raise ConfigError("a capacity is that for Poisson arrivals, not for those of a trace")
        return TrialSource(self._chosen()[0])

    @property
    def _is_drawn(self) -> bool:
        return self.source in MIXES or are_quantiles(self.source)

    def _chosen(self) -> tuple[Workload, TooLong | None]:
        """Return the requests that fit, before they get arrivals: the rate is of sent requests."""
        workload = self._sampled(self._drawn())
        if self.max_model_len is None:
            return workload, None
        action = self.too_long or ("cut" if self._is_drawn else "refuse")
        return fit_into(workload, self.max_model_len, action)

    def _drawn(self) -> Workload:
        num_drawn = self.num_requests or _NUM_DRAWN
        if self._is_drawn and (self.start_at_s > 0.0 or self.time_scale is not None):
            raise ConfigError("only a file has arrivals to start at or to stretch")
        if self.source in MIXES:
            return draw_mix(self.source, num_drawn, self.seed)
        if are_quantiles(self.source):
            return draw_quantiles(self.source, num_drawn, self.seed)
        return from_time(self._file().requests, self.start_at_s)[: self.num_requests]

    def _file(self) -> WorkloadFile:
        path = Path(self.source)
        if not path.exists():
            raise ConfigError(f"no file or mix {self.source!r}; mixes are: {', '.join(MIXES)}")
        most = None if self.start_at_s else self.num_requests
        return _read(path, path.stat().st_mtime_ns, self.reading, most)

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
        own_rate_per_s = mean_rate_per_s(workload)
        has_pattern = math.isfinite(own_rate_per_s)
        if self.arrivals == "poisson" or (self.arrivals is None and not has_pattern):
            rate_per_s = self.rate_per_s or own_rate_per_s
            return with_poisson_arrivals(workload, rate_per_s, self.seed)
        return workload if self.rate_per_s is None else rescaled(workload, self.rate_per_s)


@lru_cache(maxsize=1)
def _read(
    path: Path,
    changed_ns: int,  # noqa: ARG001
    reading: Reading,
    most: int | None,
) -> WorkloadFile:
    """Cache `read_file`: each trial of a search reads again, and a file may have a million rows."""
    return read_file(path, reading, most)
