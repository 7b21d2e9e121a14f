"""Fleets whose replicas compute nothing, in real time and on a virtual clock."""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import IO

import msgspec
import psutil

from benchmarks.runner.flags import add_promises
from benchmarks.runner.servers import server_process
from legato.core.config import SchedulerConfig
from legato_lab.load.client import Address, connect
from legato_lab.load.open_loop import send_workload
from legato_lab.simulation.fleet import SimulatedFleet, Split
from legato_lab.simulation.fleet_run import simulate_fleet
from legato_lab.simulation.machine import MeasuredServer
from legato_lab.simulation.machine_file import load_machine
from legato_lab.simulation.record import OnProgress, RequestRecord
from legato_lab.simulation.summary import Slos
from legato_lab.simulation.workload import RandomPrompts, Workload

_RAY_CPUS = 0.01
"""Of each replica: they share what cores there are."""
_VOCAB_SIZE = 32_000


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet and the load that each routing is tried on.

    Attributes:
        profile: as of `load_machine`.
        is_shedding: whether requests are refused that would be late.
    """

    profile: str
    num_replicas: int
    itl_slo_s: float
    ttft_slo_s: float
    is_shedding: bool

    @property
    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            itl_slo_s=self.itl_slo_s, ttft_slo_s=self.ttft_slo_s, shed_load=self.is_shedding
        )

    @property
    def slos(self) -> Slos:
        classes = self.scheduler.classes
        return Slos(default=classes["interactive"], by_class=classes)

    def command(self, routing: str) -> str:
        """Starts it: by Ray, or without where that is not installed."""
        flags = [
            *("--port", "{port}", "--routing", routing, "--replicas", str(self.num_replicas)),
            *("--simulate", self.profile, "--replica-cpus", str(_RAY_CPUS)),
            *("--itl-slo", f"{self.itl_slo_s}s", "--ttft-slo", f"{self.ttft_slo_s}s"),
            *(("--shed-load",) if self.is_shedding else ()),
        ]
        if find_spec("ray") is None:
            return shlex.join([sys.executable, "-m", "benchmarks.routing.local_fleet", *flags])
        return shlex.join(
            [sys.executable, "-m", "legato", "fleet", "--log-level", "warning", *flags]
        )


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """Add those from which `fleet_of` makes a fleet."""
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--simulate", default="codellama-34b-a100-tp2", metavar="PROFILE")
    add_promises(parser, itl_slo_s=0.1, ttft_slo_s=3.0)
    parser.add_argument("--shed-load", action="store_true", help="refuse what would be late")


def fleet_of(flags: argparse.Namespace) -> Fleet:
    return Fleet(
        profile=flags.simulate,
        num_replicas=flags.replicas,
        itl_slo_s=flags.itl_slo,
        ttft_slo_s=flags.ttft_slo,
        is_shedding=flags.shed_load,
    )


class RealRun(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a workload in real time.

    Attributes:
        records: one a request, by arrival.
        cpu_share: share of this machine's processors that was busy meanwhile, with any program.
        late_s: by how much the client itself sent requests too late, each.
    """

    records: list[RequestRecord]
    cpu_share: float
    late_s: list[float]


@contextmanager
def running(fleet: Fleet, routing: str, log: IO[str]) -> Iterator[tuple[psutil.Process, str]]:
    """The front door's process, and its URL."""
    with server_process(fleet.command(routing), log) as (process, url):
        yield psutil.Process(process.pid), url


def in_real_time(
    fleet: Fleet, routing: str, workload: Workload, log: IO[str], on_progress: OnProgress
) -> RealRun:
    """Serve a workload by a fleet that has just started."""
    with running(fleet, routing, log) as (_, url):
        psutil.cpu_percent()
        records = asyncio.run(send(url, workload, on_progress))
        cpu_share = psutil.cpu_percent() / 100.0
    late_s = [record.sent_s - record.request.arrival_s for record in records]
    return RealRun(records=records, cpu_share=cpu_share, late_s=late_s)


async def send(url: str, workload: Workload, on_progress: OnProgress) -> list[RequestRecord]:
    """Send each request at its time, with made-up prompts."""
    prompts = RandomPrompts(vocab_size=_VOCAB_SIZE, seed=0)
    async with connect(Address(base_url=url)) as client:
        return await send_workload(client, workload, prompts, on_progress=on_progress)


def on_a_virtual_clock(
    fleet: Fleet, routing: str, workload: Workload, seed: int
) -> Sequence[RequestRecord]:
    """Serve it by the simulator of `legato simulate --fleet`."""
    server = MeasuredServer(
        machine=load_machine(fleet.profile), scheduler=fleet.scheduler, seed=1000 * seed
    )
    simulated = SimulatedFleet(server=server, split=Split(both=fleet.num_replicas), routing=routing)
    return simulate_fleet(simulated, workload).records
