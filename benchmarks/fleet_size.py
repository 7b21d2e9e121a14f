"""What does it take to simulate a large fleet, and how does that grow?

    python -m benchmarks.fleet_size [--requests 10000,100000,1000000] [--replicas 64] [--out out]

Each size is simulated in a process of its own, with the real router, and the real engine loop,
scheduler and KV manager of every replica; figures are tallied, as `legato simulate` does beyond
100,000 requests. Time is the processor's, so that other programs show little in it. Writes
fleet_size.json and fleet_size.png.
"""

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import matplotlib.pyplot as plt
import msgspec
from rich.console import Console

from legato.cli.table import Table, duration, print_table
from legato.cli.values import count, counts, positive
from legato.core.config import SchedulerConfig
from legato.core.slo import INTERACTIVE
from legato.lab.workload.mixes import MIXES, draw_mix
from legato.simulation.fleet import SimulatedFleet, Split
from legato.simulation.fleet_run import simulate_fleet
from legato.simulation.profiled_server import SimulatedServer
from legato.simulation.profiles import PROFILES
from legato.simulation.summary import Slos
from legato.simulation.tally import Tally
from legato.simulation.workload import with_poisson_arrivals

_PROFILE = "llama-3-8b-h100"
_PROMISED = SchedulerConfig(itl_slo_s=0.05, ttft_slo_s=5.0)
_MIB = 1 << 20
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes that `ru_maxrss` counts


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: rate_per_s: of each replica's requests."""

    num_requests: int
    num_replicas: int
    rate_per_s: float
    workload: str


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: simulated_s: on the virtual clock; cpu_s, wall_s: with drawing the workload."""

    size: Size
    simulated_s: float
    num_steps: int
    num_tokens: int
    cpu_s: float
    wall_s: float
    peak_bytes: int
    attainment: float
    ttft_p99_s: float
    itl_p99_s: float


def main() -> None:
    arguments = _parse()
    console = Console(highlight=False)
    measured: list[Measured] = []
    with console.status("simulating") as status:
        for num_requests in arguments.requests:
            size = Size(
                num_requests=num_requests,
                num_replicas=arguments.replicas,
                rate_per_s=arguments.rate,
                workload=arguments.workload,
            )
            status.update(f"{num_requests:,} requests")
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                measured.append(process.submit(_measure, size).result())
            console.print(_told(measured[-1]))
    print_table(_table(measured))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "fleet_size.json").write_bytes(msgspec.json.encode(measured))
    _plot(measured, arguments.out / "fleet_size.png")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=counts, default="10000,100000,1000000")
    parser.add_argument("--replicas", type=count, default=64)
    parser.add_argument("--rate", type=positive, default=20.0, help="requests a second, of each")
    parser.add_argument("--workload", choices=tuple(MIXES), default="chat")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def _measure(size: Size) -> Measured:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    requests = draw_mix(size.workload, size.num_requests, seed=0)
    workload = with_poisson_arrivals(requests, size.num_replicas * size.rate_per_s, seed=0)
    del requests
    server = SimulatedServer(profile=PROFILES[_PROFILE], scheduler=_PROMISED)
    fleet = SimulatedFleet(server=server, split=Split(both=size.num_replicas))
    tally = Tally(Slos(default=_PROMISED.classes[INTERACTIVE]))
    run = simulate_fleet(fleet, workload, tally=tally)
    summary = tally.summary()
    assert sum(summary.num_requests.values()) == size.num_requests
    assert summary.ttft_s is not None
    assert summary.itl_s is not None
    return Measured(
        size=size,
        simulated_s=run.duration_s,
        num_steps=run.num_steps,
        num_tokens=sum(request.num_output_tokens for request in workload),
        cpu_s=time.process_time() - cpu_s,
        wall_s=time.perf_counter() - wall_s,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT,
        attainment=summary.attainment,
        ttft_p99_s=summary.ttft_s.p99,
        itl_p99_s=summary.itl_s.p99,
    )


def _told(one: Measured) -> str:
    return (
        f"{one.size.num_requests:,} requests: {one.cpu_s:.0f} s of processor time, "
        f"{one.peak_bytes / _MIB:.0f} MiB"
    )


def _table(measured: Sequence[Measured]) -> Table:
    size = measured[0].size
    return Table(
        f"{size.num_replicas} replicas ({_PROFILE}), {size.workload}, {size.rate_per_s:g}/s each",
        ["requests", "simulated", "steps", "output tokens", "processor time", "a request", "a step",
         "peak memory", "attained", "TTFT p99", "ITL p99"],
        [
            [
                f"{one.size.num_requests:,}",
                f"{one.simulated_s:.0f} s",
                f"{one.num_steps:,}",
                f"{one.num_tokens:,}",
                f"{one.cpu_s:.0f} s",
                f"{1e3 * one.cpu_s / one.size.num_requests:.2f} ms",
                f"{1e6 * one.cpu_s / one.num_steps:.0f} us",
                f"{one.peak_bytes / _MIB:.0f} MiB",
                f"{one.attainment:.1%}",
                duration(one.ttft_p99_s),
                duration(one.itl_p99_s),
            ]
            for one in measured
        ],
    )  # fmt: skip


def _plot(measured: Sequence[Measured], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    sizes = [one.size.num_requests for one in measured]
    for ax, name, values in (
        (axes[0], "processor time, s", [one.cpu_s for one in measured]),
        (axes[1], "peak memory, MiB", [one.peak_bytes / _MIB for one in measured]),
    ):
        ax.plot(sizes, values, "o-")
        ax.set(xscale="log", yscale="log", xlabel="requests", title=name)
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
