"""What does one tenant's flood do to another's first tokens? With both in one tenant, and apart.

    python -m benchmarks tenants [--only simulated|real] [--seconds 45] [flags of `legato serve`]

Three runs of the same light load: alone, beside a flood of another tenant's, and beside the same
flood as one and the same tenant, which is fairness turned off. First on simulated machines, on a
virtual clock, which takes a minute; then on a real server, where each run ends `_GRACE_S` after
the last arrival. A request that has had no token by then counts with what it has waited. Ratios are
to the first run.
"""

import argparse
import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from benchmarks.runner.flags import add_seconds, add_server_flags
from benchmarks.runner.main import main
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE, running_server, with_flags
from legato.cli.table import Table, duration
from legato.core.config import SchedulerConfig
from legato_lab.load.client import Address, connect
from legato_lab.load.open_loop import send_workload, warm_up
from legato_lab.simulation.policies import parse_policy
from legato_lab.simulation.profiled_server import SimulatedServer
from legato_lab.simulation.profiles import PROFILES
from legato_lab.simulation.record import OnProgress, RequestRecord, Status, gaps_s
from legato_lab.simulation.simulated_run import simulate
from legato_lab.simulation.workload import (
    RandomPrompts,
    Workload,
    WorkloadRequest,
    with_poisson_arrivals,
)

MINUTES = 5

LIGHT, FLOOD = "light", "flood"
_QUANTILES = (50, 95)
_VOCAB_SIZE = 40_000
_GRACE_S = 15.0

_HEADER = ["", "cut off", "TTFT mean", "p50", "p95", "ITL p99", "flood's tokens/s"]


class Scene(msgspec.Struct, frozen=True):
    """A simulated machine, its promises, and the loads: requests a second over so many seconds."""

    profile: str
    itl_slo_s: float
    ttft_slo_s: float
    light_per_s: float
    flood_per_s: float
    seconds: float


SCENES = (
    Scene("smollm2-135m-cpu", 0.1, 3.0, 0.4, 4.0, 120.0),
    Scene("smollm2-135m-cpu", 0.3, 3.0, 0.4, 4.0, 120.0),
    Scene("llama-3-8b-h100", 0.025, 1.0, 5.0, 60.0, 30.0),
    Scene("llama-3-8b-h100", 0.05, 1.0, 5.0, 60.0, 30.0),
)


class Figures(msgspec.Struct, frozen=True):
    """Of one run, the light load's but for the last two.

    Attributes:
        num_cut_off: requests whose first token had not come when the run ended.
        ttft_s: at `_QUANTILES`.
        itl_p99_s: over the streams together.
        flood_tokens_per_s: of the flood, while the light load lasted.
    """

    num_requests: int
    num_cut_off: int
    ttft_mean_s: float
    ttft_s: tuple[float, ...]
    itl_p99_s: float
    flood_tokens_per_s: float

    @classmethod
    def of(cls, records: Sequence[RequestRecord], light: Workload) -> "Figures":
        mine = _of_load(records, light)
        until_s = max(record.last_event_s for record in records)
        waits_s = [
            until_s - record.sent_s if record.ttft_s is None else record.ttft_s for record in mine
        ]
        lasted_s = min(until_s, max(record.last_event_s for record in mine))
        arrivals_s = {record.request.arrival_s for record in mine}
        others = (record for record in records if record.request.arrival_s not in arrivals_s)
        times_s = [t for record in others for t in record.token_times_s]
        return cls(
            num_requests=len(mine),
            num_cut_off=sum(record.ttft_s is None for record in mine),
            ttft_mean_s=float(np.mean(waits_s)),
            ttft_s=tuple(np.percentile(waits_s, _QUANTILES).tolist()),
            itl_p99_s=float(np.percentile(gaps_s(records), 99)),
            flood_tokens_per_s=sum(t <= lasted_s for t in times_s) / lasted_s,
        )


Measure = Callable[[str, Workload, Workload], Figures]
"""One run: its name, the workload, and the light load in it."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("simulated", "real"), help="one of the two parts")
    parser.add_argument("--light", type=float, default=0.4, help="real requests a second")
    parser.add_argument("--flood", type=float, default=4.0, help="real requests a second")
    add_seconds(parser, 45.0, help="in which real requests are sent")
    add_server_flags(parser, ("--itl-slo", "100ms", "--ttft-slo", "3s"))


def measure(run: Run) -> None:
    flags = run.flags
    results: dict[str, dict[str, Figures]] = {}
    if flags.only != "real":
        for scene in SCENES:
            name = f"{scene.profile}, ITL SLO {1e3 * scene.itl_slo_s:.0f} ms, simulated"
            loads = _loads(scene.light_per_s, scene.flood_per_s, scene.seconds)
            results[name] = _compare(run, name, *loads, _on_simulated(run, scene))
    if flags.only != "simulated":
        loads = _loads(flags.light, flags.flood, flags.seconds)
        results["real"] = _compare(run, "real server", *loads, _on_real(run))
    run.write(results)


def _compare(
    run: Run, title: str, light: Workload, flood: Workload, measured: Measure
) -> dict[str, Figures]:
    workloads = {
        "alone": _of(light, LIGHT),
        "beside a flood, tenants": _merged(_of(light, LIGHT), _of(flood, FLOOD)),
        "beside a flood, one tenant": _merged(_of(light, None), _of(flood, None)),
    }
    results: dict[str, Figures] = {}
    for name, workload in workloads.items():
        results[name] = measured(name, workload, light)
        run.tell(f"{title}, {name}: mean TTFT {duration(results[name].ttft_mean_s)}")
    rows = [_row(name, figures, results["alone"]) for name, figures in results.items()]
    run.show(Table(title, _HEADER, rows))
    return results


def _loads(light_per_s: float, flood_per_s: float, seconds: float) -> tuple[Workload, Workload]:
    """No two arrive at once, which is how they are told apart; the flood begins later."""
    light = _load(light_per_s, seconds, (200, 1500), 40, seed=1)
    flood = _load(flood_per_s, seconds, (100, 2000), 100, seed=2)
    taken_s = {request.arrival_s for request in light}
    later = [msgspec.structs.replace(r, arrival_s=round(r.arrival_s + 1.0, 6)) for r in flood]
    return light, [request for request in later if request.arrival_s not in taken_s]


def _on_simulated(run: Run, scene: Scene) -> Measure:
    common = SchedulerConfig(itl_slo_s=scene.itl_slo_s, ttft_slo_s=scene.ttft_slo_s)
    profile = PROFILES[scene.profile]
    server = SimulatedServer(profile=profile, scheduler=parse_policy("slo", common))

    def measured(name: str, workload: Workload, light: Workload) -> Figures:
        with run.status(name) as status:
            tell = _teller(status.update, name, len(workload))
            return Figures.of(simulate(server, workload, tell).records, light)

    return measured


def _on_real(run: Run) -> Measure:
    def measured(name: str, workload: Workload, light: Workload) -> Figures:
        with (
            run.status(f"{name}: starting") as status,
            running_server(with_flags(SERVE, run.flags.server_flags)) as base_url,
        ):
            tell = _teller(status.update, name, len(workload))
            until_s = run.flags.seconds + _GRACE_S
            return asyncio.run(_send(base_url, workload, light, until_s, tell))

    return measured


def _teller(tell: Callable[[str], None], run: str, num_requests: int) -> OnProgress:
    def on_progress(counts: Counter[Status]) -> None:
        sent = sum(counts.values())
        tell(f"{run}: {sent} of {num_requests} sent, {sent - counts['cancelled']} ended")

    return on_progress


def _load(
    rate_per_s: float, seconds: float, prompt: tuple[int, int], num_output: int, *, seed: int
) -> Workload:
    """Requests over so many seconds; outputs of half to 1.5 times as many tokens."""
    rng = np.random.default_rng(seed)
    drawn = [
        WorkloadRequest(
            0.0,
            int(rng.integers(*prompt)),
            int(rng.integers(num_output // 2, num_output + num_output // 2)),
        )
        for _ in range(round(rate_per_s * seconds))
    ]
    arriving = with_poisson_arrivals(drawn, rate_per_s, seed)
    return [msgspec.structs.replace(r, arrival_s=round(r.arrival_s, 6)) for r in arriving]


def _of(workload: Workload, tenant: str | None) -> Workload:
    return [msgspec.structs.replace(request, tenant=tenant) for request in workload]


def _merged(*workloads: Workload) -> Workload:
    return sorted((r for workload in workloads for r in workload), key=lambda r: r.arrival_s)


async def _send(
    base_url: str, workload: Workload, light: Workload, until_s: float, tell: OnProgress
) -> Figures:
    """Until the last of the light load has ended, or the time is over; the rest is cancelled."""
    prompts = RandomPrompts(vocab_size=_VOCAB_SIZE, seed=0)

    def is_over(now_s: float, records: Sequence[RequestRecord]) -> bool:
        mine = _of_load(records, light)
        have_ended = len(mine) == len(light) and all(r.status != "cancelled" for r in mine)
        return have_ended or now_s >= until_s

    async with connect(Address(base_url=base_url)) as client:
        await warm_up(client, workload, prompts)
        records = await send_workload(
            client, workload, prompts, on_progress=tell, stop_when=is_over
        )
    return Figures.of(records, light)


def _of_load(records: Sequence[RequestRecord], load: Workload) -> list[RequestRecord]:
    arrivals_s = {request.arrival_s for request in load}
    return [record for record in records if record.request.arrival_s in arrivals_s]


def _row(name: str, figures: Figures, alone: Figures) -> list[str]:
    waits_s = zip(
        (figures.ttft_mean_s, *figures.ttft_s), (alone.ttft_mean_s, *alone.ttft_s), strict=True
    )
    return [
        name,
        f"{figures.num_cut_off} of {figures.num_requests}",
        *(f"{1e3 * wait_s:.0f} ms ({wait_s / alone_s:.2f}x)" for wait_s, alone_s in waits_s),
        f"{1e3 * figures.itl_p99_s:.0f} ms",
        f"{figures.flood_tokens_per_s:.0f}",
    ]


if __name__ == "__main__":
    main("tenants")
