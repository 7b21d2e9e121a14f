"""Other programs that want the processor while a load runs."""

import asyncio
from collections.abc import Sequence

from benchmarks.overload.client import Load, OnProgress
from benchmarks.overload.traffic import Arrival
from benchmarks.runner.interference import spinning

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
    with spinning(num_loops):
        await asyncio.sleep(end_s - start_s)
