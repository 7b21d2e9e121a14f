"""How much load does each server sustain? Legato under its SLO, with fixed budgets, and any peers.

    python -m benchmarks.capacity --workload TRACE --itl-slo 120ms [--budget 64 ...]
        [--rate R] [--seeds K] [--num-requests N] [--peer 'NAME=MODEL=COMMAND with {port}' ...]

Starts one server after the other, searches the capacity of each as `legato bench capacity` does,
with the same requests, and prints them side by side. Writes capacity.json of each and one page.
"""

import argparse
import asyncio
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.servers import SERVE_AS_PEERS_DO, Server, add_peer_flag, running_server, servers
from legato.cli.table import print_table
from legato.cli.values import count
from legato.lab.capacity.search import Capacity
from legato.lab.commands.bench_flags import add_search_flags
from legato.lab.commands.capacity_settings import search_settings
from legato.lab.commands.workload_flags import add_workload_flags, trial_choice
from legato.lab.load.client import Address
from legato.lab.load.sessions import ask_model, random_prompts, search_capacity
from legato.lab.report.page import render_page
from legato.lab.report.report_file import CapacityReport, write_report
from legato.lab.report.tables import tables

_LEAST_REQUESTS = 40
_NOT_SETTINGS = {"peer", "out"}
_UNSAFE_IN_NAMES = re.compile(r"[^\w.-]+")


def main() -> None:
    arguments = _parse()
    console = Console(highlight=False)
    reports = []
    for server in _servers(arguments):
        name, _, command = server
        with console.status(f"{name}: starting"), running_server(command) as base_url:
            console.print(f"measuring {name}")
            capacity = _search(arguments, server, base_url)
        reports.append(CapacityReport(name=name, settings=_settings(arguments), capacity=capacity))
        file = f"capacity-{_UNSAFE_IN_NAMES.sub('-', name)}.json"
        write_report(arguments.out / file, reports[-1])
    for table in tables(reports):
        print_table(table)
    (arguments.out / "capacity.html").write_text(render_page(reports), encoding="utf-8")
    console.print(f"written to {arguments.out}/capacity.html, and as JSON beside it")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_workload_flags(parser)
    add_search_flags(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random")
    parser.add_argument(
        "--budget",
        dest="budgets",
        type=count,
        action="append",
        default=[],
        metavar="TOKENS",
        help="a fixed one of Legato's, beside its SLO; may be repeated",
    )
    parser.add_argument("--out", type=Path, default=Path("out"))
    add_peer_flag(parser)
    return parser.parse_args()


def _servers(arguments: argparse.Namespace) -> list[Server]:
    slo_ms = 1000 * arguments.itl_slo
    legato = {f"Legato, --itl-slo {slo_ms:g}ms": f"{SERVE_AS_PEERS_DO} --itl-slo {slo_ms:g}ms"}
    for budget in arguments.budgets:
        flags = f"--max-num-batched-tokens {budget}"
        legato[f"Legato, budget {budget}"] = f"{SERVE_AS_PEERS_DO} {flags}"
    return servers(legato, arguments.peer)


def _search(arguments: argparse.Namespace, server: Server, base_url: str) -> Capacity:
    address = Address(base_url=base_url, model=server[1])
    model = asyncio.run(ask_model(address))
    return search_capacity(
        address,
        trial_choice(arguments, model.max_model_len),
        asyncio.run(random_prompts(address, vocab_size=None, seed=arguments.seed)),
        search_settings(arguments, arguments.itl_slo, _LEAST_REQUESTS),
    )


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(arguments).items() if key not in _NOT_SETTINGS}


if __name__ == "__main__":
    main()
