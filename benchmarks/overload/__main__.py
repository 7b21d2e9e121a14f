"""Does a server keep its word to whom it admits, when more comes than it can serve?

    python -m benchmarks overload [--seconds 600] [--rate 4] [--tenants 1] [--busy-loop 1]
                                  [flags of `legato serve`]

Starts a server that sheds load and sends it short chats, prompts of a page and documents, at random
times and in bursts; some clients go away in the middle. With `--tenants`, so many tenants share
this load. With `--busy-loop`, other processes want the processor meanwhile. A request is within its
promises if its first token came within the TTFT SLO and at least 99 % of the gaps between its
tokens (all, where there are fewer than 100) within the ITL SLO, by the client's clock. Exits with
status 1 where a request was lost or an engine died.
"""

import argparse
import asyncio
import re
from urllib.parse import urlsplit

import httpx
import numpy as np

from benchmarks.overload.busy import Span, run_beside_loops
from benchmarks.overload.client import Load
from benchmarks.overload.report import figures, plot, stretches, tables
from benchmarks.overload.traffic import Arrival, arrivals
from benchmarks.runner.flags import add_promises, add_seconds, add_seed, add_server_flags
from benchmarks.runner.main import main
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE, server_process, with_flags
from legato.cli.table import duration
from legato.cli.values import duration_s
from legato.core.slo import SloClass

MINUTES = 11

_DEATHS = re.compile(r"^legato:num_engine_restarts_total(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_seconds(parser, 600.0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second, Poisson")
    parser.add_argument("--burst", type=int, default=12, help="requests at once, beside those")
    parser.add_argument("--burst-every", type=duration_s, default=20.0, metavar="DURATION")
    parser.add_argument("--tenants", type=int, default=1, help="that share the load")
    parser.add_argument("--leaving", type=float, default=0.08, help="share of the clients")
    add_promises(parser, itl_slo_s=0.15, ttft_slo_s=3.0)
    parser.add_argument("--busy-loop", type=int, default=0, help="processes that only spin")
    parser.add_argument("--busy-from", type=duration_s, default=0.0, metavar="DURATION")
    parser.add_argument("--busy-for", type=duration_s, metavar="DURATION", help="else to the end")
    add_seed(parser)
    add_server_flags(parser)


def measure(run: Run) -> int:
    flags = run.flags
    promise = SloClass(itl_s=flags.itl_slo, ttft_s=flags.ttft_slo)
    busy = _busy_span(flags)
    promised = f"--itl-slo {flags.itl_slo}s --ttft-slo {flags.ttft_slo}s --shed-load"
    command = with_flags(f"{SERVE} {promised}", flags.server_flags)
    with (
        run.path(".log").open("w") as log,
        server_process(command, log) as (_, url),
    ):
        load = Load(urlsplit(url).port or 0)
        asyncio.run(
            run_beside_loops(load, _traffic(flags), flags.busy_loop, busy or (0.0, 0.0), run.tell)
        )
        num_deaths = _num_engine_deaths(url)
    answers = sorted(load.answers, key=lambda answer: answer.request.arrival_s)
    found = {
        name: figures(own, promise, seconds)
        for name, (own, seconds) in stretches(answers, flags.seconds, busy).items()
    }
    run.picture(plot(answers, promise, busy))
    for table in tables(found, answers):
        run.show(table)
    print("The server is gone." if num_deaths is None else f"Deaths of the engine: {num_deaths}.")
    late_s = np.percentile(load.lateness_s, [99, 100])
    print(f"The client itself woke late by {', '.join(map(duration, late_s))} (p99, max).")
    run.write(
        {
            "figures": found,
            "promise": promise,
            "engine_deaths": num_deaths,
            "busy": busy,
            "requests": answers,
        }
    )
    return 1 if found["whole run"].lost or num_deaths != 0 else 0


def _num_engine_deaths(url: str) -> int | None:
    """As the server counts them; None where it is gone, as after three in a row."""
    try:
        metrics = httpx.get(f"{url}/metrics", timeout=30.0).text
    except httpx.TransportError:
        return None
    told = _DEATHS.search(metrics)
    return None if told is None else int(float(told[1]))


def _busy_span(flags: argparse.Namespace) -> Span | None:
    if not flags.busy_loop:
        return None
    end_s = flags.seconds
    if flags.busy_for is not None:
        end_s = min(end_s, flags.busy_from + flags.busy_for)
    return flags.busy_from, end_s


def _traffic(flags: argparse.Namespace) -> list[Arrival]:
    return arrivals(
        seconds=flags.seconds,
        rate_per_s=flags.rate,
        burst=flags.burst,
        burst_every_s=flags.burst_every,
        leaving=flags.leaving,
        num_tenants=flags.tenants,
        seed=flags.seed,
    )


if __name__ == "__main__":
    main("overload")
