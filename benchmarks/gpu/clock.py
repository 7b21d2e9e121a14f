"""How long work on a device takes, and how fast its clock runs."""

import itertools
import statistics
import subprocess
import time
from collections.abc import Callable

import torch

from legato.gpu.device import CudaDevice

_WARM_UPS = 3
_REPEATS_ON_HOST = 2
_CALLS_IN_GRAPH = 8


def median_s(
    call: Callable[[], object], device: torch.device, repeats: int = 10, *, warm_s: float = 0.0
) -> float:
    """Of several calls, one after the other on the device; the first ones do not count.

    On a host a few will do, where only the benchmark itself is tried.

    Args:
        warm_s: how long calls run before one counts, so that the chip is as hot as in a long run.
    """
    if device.type != "cuda":
        return statistics.median(_on_host(call, _REPEATS_ON_HOST))
    until_s = time.perf_counter() + warm_s
    while True:
        for _ in range(_WARM_UPS):
            call()
        torch.cuda.synchronize()
        if time.perf_counter() >= until_s:
            return statistics.median(_on_device(call, repeats))


def sm_clock_mhz(device: torch.device) -> int | None:
    """The clock of the multiprocessors right now; None if it cannot be read."""
    if device.type != "cuda":
        return None
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    command.append(f"--id={device.index or 0}")
    try:
        told = subprocess.check_output(command, text=True, timeout=5, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return int(told) if told.strip().isdigit() else None


def median_in_graph_s(call: Callable[[], object], device: torch.device) -> float:
    """As in a step: launched by a graph, so that what the host takes to launch does not count."""
    if device.type != "cuda":
        return median_s(call, device)

    def calls() -> None:
        for _ in range(_CALLS_IN_GRAPH):
            call()

    return median_s(captured(calls, device), device) / _CALLS_IN_GRAPH


def captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """One CUDA graph of it, as steps are recorded."""
    for _ in range(_WARM_UPS):
        work()
    return CudaDevice(device).capture(work)


def _on_device(call: Callable[[], object], repeats: int) -> list[float]:
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(repeats + 1)
    ]
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
