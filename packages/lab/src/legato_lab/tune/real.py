"""Runs a workload on the real engine, through its HTTP server."""

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from legato.core.config import EngineConfig
from legato.core.serve_flags import serve_flags
from legato.observe.traces.trace_file import read_trace
from legato_lab.load.client import Address, connect
from legato_lab.load.local_server import SERVE, local_server
from legato_lab.load.open_loop import send_workload, warm_up
from legato_lab.report.console import progress_bar
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.workload import RandomPrompts, Workload
from legato_lab.tune.recording import Recording


class RealRun(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: start_s: on `time.monotonic`; wall_s: with the server's start and end."""

    records: list[RequestRecord]
    start_s: float
    wall_s: float


def run_real(
    config: EngineConfig,
    workload: Workload,
    prompts: RandomPrompts,
    name: str,
    more_flags: Sequence[str] = (),
) -> RealRun:
    """Start a server, send the workload, and stop it.

    Raises:
        ConfigError: the server cannot be started as configured.
    """
    started_s = time.monotonic()
    with local_server([*SERVE, *serve_flags(config), *more_flags], log=sys.stderr) as (_, url):
        start_s, records = asyncio.run(_send(url, workload, prompts, name))
    return RealRun(records=records, start_s=start_s, wall_s=time.monotonic() - started_s)


def record_real(
    config: EngineConfig, workload: Workload, prompts: RandomPrompts, name: str
) -> tuple[RealRun, Recording]:
    """Run the workload as `run_real`, and return what the engine recorded meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        run = run_real(config, workload, prompts, name, ["--trace", str(trace)])
        _, lines = read_trace(trace)
        return run, Recording.of(lines, since_s=run.start_s)


async def _send(
    url: str, workload: Workload, prompts: RandomPrompts, name: str
) -> tuple[float, list[RequestRecord]]:
    async with connect(Address(base_url=url)) as client:
        await warm_up(client, workload, prompts)
        with progress_bar(name, len(workload)) as on_progress:
            start_s = time.monotonic()
            records = await send_workload(client, workload, prompts, on_progress=on_progress)
    return start_s, records
