"""Does a server keep its word to whom it admits, when more comes than it can serve?

    python -m benchmarks.overload [--seconds 600] [--rate 4] [--tenants 1] [--busy-loop 1]
                                  [--out out] [any flags of `legato serve`]

Starts a server that sheds load and sends it short chats, prompts of a page and documents, at random
times and in bursts; some clients go away in the middle. With `--tenants`, so many tenants share
this load. With `--busy-loop`, other processes want
the processor meanwhile. A request is within its promises if its first token came within the TTFT
SLO and at least 99 % of the gaps between its tokens (all, where there are fewer than 100) within
the ITL SLO, by the client's clock. Prints tables and how often the engine died, writes
overload.json, overload.log and overload.png, and exits with status 1 where a request was lost or an
engine died.
"""

import argparse
import asyncio
import re
import shlex
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
from rich.console import Console

from benchmarks.overload.busy import Span, run_beside_loops
from benchmarks.overload.client import Load
from benchmarks.overload.report import figures, plot, stretches, tables
from benchmarks.overload.traffic import Arrival, arrivals
from benchmarks.servers import SERVE, server_process
from legato.cli.table import duration, print_table
from legato.cli.values import duration_s
from legato.core.slo import SloClass

_DEATHS = re.compile(r"^legato:num_engine_restarts_total(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def main() -> int:
    arguments, serve_flags = _parse()
    console = Console(stderr=True, highlight=False)
    promise = SloClass(itl_s=arguments.itl_slo, ttft_s=arguments.ttft_slo)
    busy = _busy_span(arguments)
    traffic = _traffic(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    flags = f"--itl-slo {arguments.itl_slo}s --ttft-slo {arguments.ttft_slo}s --shed-load"
    command = f"{SERVE} {flags} {shlex.join(serve_flags)}"
    with (
        (arguments.out / "overload.log").open("w") as log,
        server_process(command, log) as (_, url),
    ):
        load = Load(urlsplit(url).port or 0)
        asyncio.run(
            run_beside_loops(load, traffic, arguments.busy_loop, busy or (0.0, 0.0), console.print)
        )
        num_deaths = _num_engine_deaths(url)
    answers = sorted(load.answers, key=lambda answer: answer.request.arrival_s)
    found = {
        name: figures(own, promise, seconds)
        for name, (own, seconds) in stretches(answers, arguments.seconds, busy).items()
    }
    written = {
        "figures": found,
        "promise": promise,
        "tenants": arguments.tenants,
        "engine_deaths": num_deaths,
        "busy": busy,
        "requests": answers,
    }
    (arguments.out / "overload.json").write_bytes(msgspec.json.encode(written))
    plot(answers, promise, busy, arguments.out / "overload.png")
    for table in tables(found, answers):
        print_table(table)
    print("The server is gone." if num_deaths is None else f"Deaths of the engine: {num_deaths}.")
    late_s = np.percentile(load.lateness_s, [99, 100])
    print(f"The client itself woke late by {', '.join(map(duration, late_s))} (p99, max).")
    print(f"written to {arguments.out}/overload.json, overload.log and overload.png")
    return 1 if found["whole run"].lost or num_deaths != 0 else 0


def _num_engine_deaths(url: str) -> int | None:
    """As the server counts them; None where it is gone, as after three in a row."""
    try:
        metrics = httpx.get(f"{url}/metrics", timeout=30.0).text
    except httpx.TransportError:
        return None
    told = _DEATHS.search(metrics)
    return None if told is None else int(float(told[1]))


def _parse() -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own flags, and those for the server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="in which requests come")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second, Poisson")
    parser.add_argument("--burst", type=int, default=12, help="requests at once, beside those")
    parser.add_argument("--burst-every", type=duration_s, default=20.0, metavar="DURATION")
    parser.add_argument("--tenants", type=int, default=1, help="that share the load")
    parser.add_argument("--leaving", type=float, default=0.08, help="share of the clients")
    parser.add_argument("--itl-slo", type=duration_s, default=0.15, metavar="DURATION")
    parser.add_argument("--ttft-slo", type=duration_s, default=3.0, metavar="DURATION")
    parser.add_argument("--busy-loop", type=int, default=0, help="processes that only spin")
    parser.add_argument("--busy-from", type=duration_s, default=0.0, metavar="DURATION")
    parser.add_argument("--busy-for", type=duration_s, metavar="DURATION", help="else to the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_known_args()


def _busy_span(arguments: argparse.Namespace) -> Span | None:
    if not arguments.busy_loop:
        return None
    end_s = arguments.seconds
    if arguments.busy_for is not None:
        end_s = min(end_s, arguments.busy_from + arguments.busy_for)
    return arguments.busy_from, end_s


def _traffic(arguments: argparse.Namespace) -> list[Arrival]:
    return arrivals(
        seconds=arguments.seconds,
        rate_per_s=arguments.rate,
        burst=arguments.burst,
        burst_every_s=arguments.burst_every,
        leaving=arguments.leaving,
        num_tenants=arguments.tenants,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
