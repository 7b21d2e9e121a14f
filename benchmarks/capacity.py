"""How much load does each server sustain? Legato under its SLO, with fixed budgets, and any peers.

    python -m benchmarks capacity --workload TRACE --itl-slo 120ms [--budget 64 ...]
        [--rate R] [--seeds K] [--num-requests N] [--peer 'NAME=MODEL=COMMAND with {port}' ...]

Starts one server after the other, searches the capacity of each as `legato bench capacity` does,
with the same requests, and prints them side by side. Writes a report of each, which `legato bench
report` reads, and one page.
"""

import argparse
import asyncio
import re

from benchmarks.runner.flags import add_peers, add_seed
from benchmarks.runner.main import main
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE_AS_PEERS_DO, Server, running_server, servers
from legato.cli.values import count
from legato_lab.capacity.search import Capacity
from legato_lab.commands.bench_flags import add_search_flags
from legato_lab.commands.bench_reports import report_settings
from legato_lab.commands.capacity_settings import search_settings
from legato_lab.commands.workload_flags import add_workload_flags, trial_choice
from legato_lab.load.client import Address
from legato_lab.load.sessions import ask_model, random_prompts, search_capacity
from legato_lab.report.page import render_page
from legato_lab.report.report_file import CapacityReport, write_report
from legato_lab.report.tables import tables

MINUTES = 30

_LEAST_REQUESTS = 40
_NOT_SETTINGS = {"peer", "out"}
_UNSAFE_IN_NAMES = re.compile(r"[^\w.-]+")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_workload_flags(parser)
    add_search_flags(parser)
    add_seed(parser)
    parser.add_argument(
        "--budget",
        dest="budgets",
        type=count,
        action="append",
        default=[],
        metavar="TOKENS",
        help="a fixed one of Legato's, beside its SLO; may be repeated",
    )
    add_peers(parser)


def measure(run: Run) -> None:
    reports = []
    for server in _servers(run.flags):
        with (
            run.status(f"{server.name}: starting"),
            running_server(server.command) as base_url,
        ):
            run.tell(f"measuring {server.name}")
            capacity = _search(run.flags, server, base_url)
        settings = report_settings(run.flags, _NOT_SETTINGS)
        reports.append(CapacityReport(name=server.name, settings=settings, capacity=capacity))
        place = run.path(f"-{_UNSAFE_IN_NAMES.sub('-', server.name)}.json")
        write_report(place, reports[-1])
    for table in tables(reports):
        run.show(table)
    run.path(".html").write_text(render_page(reports), encoding="utf-8")
    run.write({report.name: report.capacity for report in reports})


def _servers(flags: argparse.Namespace) -> list[Server]:
    slo_ms = 1000 * flags.itl_slo_s
    legato = {f"Legato, --itl-slo {slo_ms:g}ms": f"{SERVE_AS_PEERS_DO} --itl-slo {slo_ms:g}ms"}
    for budget in flags.budgets:
        command = f"{SERVE_AS_PEERS_DO} --itl-slo off --max-num-batched-tokens {budget}"
        legato[f"Legato, budget {budget}"] = command
    return servers(legato, flags.peer)


def _search(flags: argparse.Namespace, server: Server, base_url: str) -> Capacity:
    address = Address(base_url=base_url, model=server.model)
    model = asyncio.run(ask_model(address))
    return search_capacity(
        address,
        trial_choice(flags, model.max_model_len),
        asyncio.run(random_prompts(address, vocab_size=None, seed=flags.seed)),
        search_settings(flags, flags.itl_slo_s, _LEAST_REQUESTS),
    )


if __name__ == "__main__":
    main("capacity")
