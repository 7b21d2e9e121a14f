"""What does one tenant's flood do to another's first tokens? With both in one tenant, and apart.

    python -m benchmarks.tenants [--light 0.4] [--flood 4.0] [--seconds 120] [--out out]

One server, three runs of the same light load: alone, beside a flood of another tenant's, and beside
the same flood as one and the same tenant, which is fairness turned off. Prints a table with ratios
to the first run and writes tenants.json.
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.servers import SERVE, running_server
from legato.bench.load.client import Address, connect
from legato.bench.load.open_loop import send_workload, warm_up
from legato.bench.load.record import RequestRecord, gaps_s
from legato.bench.workload.requests import (
    RandomPrompts,
    Workload,
    WorkloadRequest,
    with_poisson_arrivals,
)

LIGHT, FLOOD = "light", "flood"
_QUANTILES = (50, 90, 99)
_VOCAB_SIZE = 40_000


class Figures(msgspec.Struct, frozen=True):
    """Of one run, the light tenant's but for the last two.

    Attributes:
        ttft_s: at `_QUANTILES`.
        itl_p99_s: of all streams.
        tokens_per_s: of all streams, while the light load lasted.
    """

    num_requests: int
    num_refused: int
    ttft_mean_s: float
    ttft_s: tuple[float, ...]
    itl_p99_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, records: Sequence[RequestRecord], light: Workload) -> "Figures":
        mine = _of_load(records, light)
        ttft_s = np.array([record.ttft_s for record in mine if record.ttft_s is not None])
        until_s = max(record.last_event_s for record in mine)
        num_tokens = sum(t <= until_s for record in records for t in record.token_times_s)
        return cls(
            num_requests=len(mine),
            num_refused=sum(record.status == "refused" for record in mine),
            ttft_mean_s=float(ttft_s.mean()),
            ttft_s=tuple(np.percentile(ttft_s, _QUANTILES).tolist()),
            itl_p99_s=float(np.percentile(gaps_s(records), 99)),
            tokens_per_s=num_tokens / until_s,
        )


def main() -> None:
    arguments = _parse()
    console = Console()
    light = _load(arguments.light, arguments.seconds, (200, 1500), 40, seed=1)
    flood = _load(arguments.flood, arguments.seconds, (100, 2000), 100, seed=2)
    runs = {
        "alone": _merged(_of(light, LIGHT)),
        "beside a flood, tenants": _merged(_of(light, LIGHT), _of(flood, FLOOD)),
        "beside a flood, one tenant": _merged(_of(light, None), _of(flood, None)),
    }
    results: dict[str, Figures] = {}
    for name, workload in runs.items():
        command = f"{SERVE} {arguments.flags}"
        with console.status(f"{name}: starting"), running_server(command) as base_url:
            console.print(f"measuring {name}")
            results[name] = asyncio.run(_measure(base_url, workload, light))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "tenants.json").write_bytes(msgspec.json.encode(results))
    console.print(_table(results))
    console.print(f"written to {arguments.out}/tenants.json")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--light", type=float, default=0.4, help="requests a second")
    parser.add_argument("--flood", type=float, default=4.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--flags", default="--itl-slo 100ms --ttft-slo 3s", help="of the server")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


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


async def _measure(base_url: str, workload: Workload, light: Workload) -> Figures:
    """Until the last of the light load has ended; what is left of the flood is cancelled."""
    prompts = RandomPrompts(vocab_size=_VOCAB_SIZE, seed=0)

    def is_over(_: float, records: Sequence[RequestRecord]) -> bool:
        mine = _of_load(records, light)
        return len(mine) == len(light) and all(r.status != "cancelled" for r in mine)

    async with connect(Address(base_url=base_url)) as client:
        await warm_up(client, workload, prompts)
        records = await send_workload(client, workload, prompts, stop_when=is_over)
    return Figures.of(records, light)


def _of_load(records: Sequence[RequestRecord], load: Workload) -> list[RequestRecord]:
    arrivals_s = {request.arrival_s for request in load}
    return [record for record in records if record.request.arrival_s in arrivals_s]


def _table(results: dict[str, Figures]) -> Table:
    first, *_ = results.values()
    quantiles = [f"p{quantile}" for quantile in _QUANTILES]
    table = Table("light load", "refused", "TTFT mean", *quantiles, "ITL p99", "tokens/s of all")
    for name, figures in results.items():
        waits_s = zip(
            (figures.ttft_mean_s, *figures.ttft_s), (first.ttft_mean_s, *first.ttft_s), strict=True
        )
        table.add_row(
            name,
            f"{figures.num_refused} of {figures.num_requests}",
            *(f"{1e3 * wait_s:.0f} ms ({wait_s / alone_s:.2f}x)" for wait_s, alone_s in waits_s),
            f"{1e3 * figures.itl_p99_s:.0f} ms",
            f"{figures.tokens_per_s:.0f}",
        )
    return table


if __name__ == "__main__":
    main()
