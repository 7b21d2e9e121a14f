"""Other programs that want the processor while a load runs."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.overload.client import Load, OnProgress
from benchmarks.overload.traffic import Arrival

_SPIN = (sys.executable, "-c", "while True: pass")

Span = tuple[float, float]
"""From when to when, in seconds from the start of the run."""


async def run_beside_loops(
    load: Load, traffic: Sequence[Arrival], num_loops: int, busy: Span, on_progress: OnProgress
) -> None:
    """Run a load beside so many processes that only spin, which end with it at the latest."""
    spinning = asyncio.create_task(_spin(num_loops, busy))
    try:
        await load.run(traffic, on_progress)
    finally:
        spinning.cancel()
        await asyncio.wait([spinning])


async def _spin(num_loops: int, span: Span) -> None:
    start_s, end_s = span
    await asyncio.sleep(start_s)
    loops = [subprocess.Popen(_SPIN) for _ in range(num_loops)]
    try:
        await asyncio.sleep(end_s - start_s)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
