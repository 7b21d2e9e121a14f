"""How long work on a device takes."""

import itertools
import statistics
import time
from collections.abc import Callable

import torch

_WARM_UPS = 3
_REPEATS_ON_HOST = 2


def median_s(call: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Of several calls, one behind the other on the device; the first ones do not count.

    On a host a few will do, where only the benchmark itself is tried.
    """
    if device.type != "cuda":
        return statistics.median(_on_host(call, _REPEATS_ON_HOST))
    for _ in range(_WARM_UPS):
        call()
    return statistics.median(_on_device(call, repeats))


def _on_device(call: Callable[[], object], repeats: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [begun.elapsed_time(ended) / 1e3 for begun, ended in itertools.pairwise(events)]


def _on_host(call: Callable[[], object], repeats: int) -> list[float]:
    times_s = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - begun_s)
    return times_s
