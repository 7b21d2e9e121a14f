"""Which workload to run, as a user chooses it."""

import math
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

from legato.bench.workload.formats.rows import WorkloadFile
from legato.bench.workload.mixes import MIXES, draw_mix
from legato.bench.workload.notes import WorkloadNotes
from legato.bench.workload.quantiles import are_quantiles, draw_quantiles
from legato.bench.workload.requests import (
    Workload,
    mean_rate_per_s,
    rescaled,
    with_poisson_arrivals,
    within,
)
from legato.bench.workload.too_long import TooLong, TooLongAction, fit_into
from legato.bench.workload.traces import Reading, read_file
from legato.core.errors import ConfigError

Arrivals = Literal["trace", "poisson"]
_NUM_DRAWN = 100


class WorkloadChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a workload.

    Attributes:
        source: a file, a key of `MIXES`, or quantiles.
        num_requests: how many of its requests; None takes a file's all, and 100 of what is drawn.
        rate_per_s: None takes the file's own; requests that are drawn then all arrive at once.
        arrivals: the file's own pattern or a random one; None takes the file's, and a random one
            where there is none.
        duration_s: leaves out what arrives later.
        max_model_len: longest prompt plus output in tokens; None takes any.
        too_long: what becomes of longer ones; None refuses a file's and cuts those that are drawn.
            It is asked of all that were chosen, before `duration_s` leaves any out.
        reading: of a file.
    """

    source: str
    num_requests: int | None = None
    rate_per_s: float | None = None
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
                and not to be cut or dropped, or nothing is left.
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

    def at_poisson_rate(self, rate_per_s: float) -> Workload:
        """The same requests as a trial of a capacity, in which they arrive at random.

        Raises:
            ConfigError: as `load`, or they were chosen to arrive otherwise.
        """
        if self.arrivals == "trace":
            raise ConfigError("a capacity is that for Poisson arrivals, not for those of a trace")
        return msgspec.structs.replace(self, rate_per_s=rate_per_s, arrivals="poisson").load()

    @property
    def _is_drawn(self) -> bool:
        return self.source in MIXES or are_quantiles(self.source)

    def _chosen(self) -> tuple[Workload, TooLong | None]:
        """Those that fit, before they are given times: the rate is that of what is sent."""
        workload = self._drawn()
        if self.max_model_len is None:
            return workload, None
        action = self.too_long or ("cut" if self._is_drawn else "refuse")
        return fit_into(workload, self.max_model_len, action)

    def _drawn(self) -> Workload:
        num_drawn = self.num_requests or _NUM_DRAWN
        if self.source in MIXES:
            return draw_mix(self.source, num_drawn, self.seed)
        if are_quantiles(self.source):
            return draw_quantiles(self.source, num_drawn, self.seed)
        return self._file().requests[: self.num_requests]

    def _file(self) -> WorkloadFile:
        path = Path(self.source)
        if not path.exists():
            raise ConfigError(f"no file or mix {self.source!r}; mixes are: {', '.join(MIXES)}")
        return _read(path, path.stat().st_mtime_ns, self.reading, self.num_requests)

    def _arriving(self, workload: Workload) -> Workload:
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
