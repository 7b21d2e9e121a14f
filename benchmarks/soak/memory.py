"""How much memory the server's processes have resident, over time."""

from collections.abc import Sequence

import msgspec
import numpy as np
import psutil

_WARM_UP = 0.25
"""Share of a process's life in which it may grow: caches fill, kernels are compiled."""
_COMPARED = 0.25
"""Share of its life at either end of the rest, whose medians are compared."""


class Resident(msgspec.Struct, frozen=True):
    """One process at one time.

    Attributes:
        process: "server" or "engine".
        at_s: from the start of the load.
    """

    process: str
    pid: int
    at_s: float
    num_bytes: int


def engine_of(server: psutil.Process) -> psutil.Process | None:
    """Its engine process, if there is one just now."""
    for child in server.children():
        try:
            if "legato.engine.main" in child.cmdline():
                return child
        except psutil.Error:
            continue
    return None


def sample(server: psutil.Process, at_s: float) -> list[Resident]:
    """Of the server and its engine; what ends meanwhile is left out."""
    samples = []
    for name, process in (("server", server), ("engine", engine_of(server))):
        try:
            if process is not None:
                num_bytes = process.memory_info().rss
                samples.append(Resident(name, process.pid, at_s, num_bytes))
        except psutil.Error:
            continue
    return samples


def lives(samples: Sequence[Resident]) -> dict[int, list[Resident]]:
    """The samples of each process; key pid."""
    found: dict[int, list[Resident]] = {}
    for one in samples:
        found.setdefault(one.pid, []).append(one)
    return found


def growth(life: Sequence[Resident]) -> float:
    """By what fraction a process grew once it was warm."""
    values = np.array([one.num_bytes for one in life], dtype=np.float64)
    warm = values[int(_WARM_UP * len(values)) :]
    num_compared = max(1, int(_COMPARED * len(values)))
    return float(np.median(warm[-num_compared:]) / np.median(warm[:num_compared]) - 1.0)
