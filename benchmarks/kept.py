"""How often is what was promised delivered, probe by probe, on a server that goes on running?

    python -m benchmarks.kept [--probes 10] [--shapes 12x3x3000@120ms ...]

For each shape, streams that run, long prompts that come at once and their length, one server is
started with the ITL SLO behind the "@", and asked again and again. Says in how many probes the P99
of the streams' gaps, while the prompts were computed, was within the SLO, and what `/health` told
of it. Prints a table and writes kept.json.
"""

import argparse
import asyncio
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.promise import Outcome, Shape, probe
from benchmarks.servers import SERVE, running_server
from legato.cli.values import gap_promise

_SHAPES = ("12x3x3000@120ms", "8x1x7000@120ms", "32x3x4000@200ms")
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)@(.+)")


class Promised(msgspec.Struct, frozen=True):
    """A shape, and the ITL SLO of the server that it is asked of, as typed and in seconds."""

    shape: Shape
    itl_slo: str
    itl_s: float
    quantile: float


class Probed(msgspec.Struct, frozen=True):
    """Of one probe. Attributes: `outcome`: None where it took too long; `health`: told after it."""

    outcome: Outcome | None
    is_kept: bool
    health: dict[str, Any]


def main() -> None:
    arguments = _parse()
    console = Console(highlight=False)
    table = Table("streams", "long prompts", "SLO", "kept", "p99, probe by probe", "TTFT, median")
    written: list[tuple[Promised, list[Probed]]] = []
    for promised in map(_promised, arguments.shapes):
        probed = _measure(console, promised, arguments)
        _add_row(table, promised, probed)
        written.append((promised, probed))
    console.print(table)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "kept.json").write_bytes(msgspec.json.encode(written))
    console.print(f"written to {arguments.out}/kept.json")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--probes", type=int, default=10, help="of each shape")
    parser.add_argument("--shapes", nargs="+", default=_SHAPES, metavar="STREAMSxLONGSxTOKENS@SLO")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for a probe")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def _promised(text: str) -> Promised:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise SystemExit(f"{text!r} is not STREAMSxLONGSxTOKENS@SLO")
    num_streams, num_longs, long_prompt = map(int, match.groups()[:3])
    seconds, quantile = gap_promise(match[4])
    return Promised(Shape(num_streams, long_prompt, num_longs), match[4], seconds, quantile)


def _measure(console: Console, promised: Promised, arguments: argparse.Namespace) -> list[Probed]:
    probed: list[Probed] = []
    command = f"{SERVE} --itl-slo {promised.itl_slo}"
    with console.status(f"{promised.shape}: starting") as status, running_server(command) as url:
        for index in range(arguments.probes):
            status.update(f"{promised.shape}, probe {index + 1} of {arguments.probes}")
            outcome = asyncio.run(probe(url, promised.shape, index, arguments.timeout))
            is_kept = outcome is not None and outcome.itl_p99_s <= promised.itl_s
            probed.append(Probed(outcome, is_kept, _health(url)))
            console.print(promised.shape, promised.itl_slo, probed[-1])
    return probed


def _health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/health", timeout=10.0) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def _add_row(table: Table, promised: Promised, probed: list[Probed]) -> None:
    outcomes = [each.outcome for each in probed if each.outcome is not None]
    p99s = ", ".join(f"{1e3 * outcome.itl_p99_s:.0f}" for outcome in outcomes)
    ttft = f"{np.median([o.ttft_s for o in outcomes]):.1f} s" if outcomes else "none in time"
    table.add_row(
        str(promised.shape.num_streams),
        f"{promised.shape.num_longs} of {promised.shape.long_prompt:,}",
        promised.itl_slo,
        f"{sum(each.is_kept for each in probed)} of {len(probed)}",
        f"{p99s} ms",
        ttft,
    )


if __name__ == "__main__":
    main()
