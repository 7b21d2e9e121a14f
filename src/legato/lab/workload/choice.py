"""Which workload to run, as a user chooses it."""

import math
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from legato.core.errors import ConfigError
from legato.lab.workload.formats.rows import WorkloadFile
from legato.lab.workload.mixes import MIXES, draw_mix
from legato.lab.workload.notes import WorkloadNotes
from legato.lab.workload.quantiles import are_quantiles, draw_quantiles
from legato.lab.workload.too_long import TooLong, TooLongAction, fit_into
from legato.lab.workload.traces import Reading, read_file
from legato.lab.workload.trials import TrialSource
from legato.simulation.workload import (
    Workload,
    from_time,
    mean_rate_per_s,
    rescaled,
    stretched,
    with_poisson_arrivals,
    within,
)

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
        arrivals: the file's own pattern or a random one; None takes the file's, and a random one
            where there is none.
        duration_s: leaves out what arrives later.
        max_model_len: longest prompt plus output in tokens; None takes any.
        too_long: what becomes of longer ones; None refuses a file's and cuts those that are drawn.
            It is asked of all that were chosen, before `duration_s` leaves any out.
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
        """The requests that were chosen, arriving as they were chosen to.

        Raises:
            ConfigError: there is no such file or mix, the file is malformed, requests are too long
                and not to be cut or dropped, nothing is left, or what was chosen contradicts
                itself.
        """
        workload = self._arriving(self._chosen()[0])
        if self.duration_s is not None:
            workload = within(workload, self.duration_s)
        if not workload:
            raise ConfigError("the workload has no requests")
        return workload

    def notes(self) -> WorkloadNotes:
        """What is left out or shortened of the requests that were chosen; raises as `load`."""
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
        """The same for the trials of a capacity, which have numbers and lengths of their own."""
        num_requests = _NUM_DRAWN_FOR_TRIALS if self._is_drawn else None
        return msgspec.structs.replace(self, num_requests=num_requests, duration_s=None)

    def trials(self) -> TrialSource:
        """The requests that trials draw from, in which they arrive at random.

        Raises:
            ConfigError: as `load`, or they were chosen to arrive otherwise.
        """
        if self.arrivals == "trace" or self.time_scale is not None:
            raise ConfigError("a capacity is that for Poisson arrivals, not for those of a trace")
        return TrialSource(self._chosen()[0])

    @property
    def _is_drawn(self) -> bool:
        return self.source in MIXES or are_quantiles(self.source)

    def _chosen(self) -> tuple[Workload, TooLong | None]:
        """Those that fit, before they are given times: the rate is that of what is sent."""
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
    """As `read_file`. Each trial of a capacity asks again, and a file may have a million rows."""
    return read_file(path, reading, most)
