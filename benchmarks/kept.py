"""How often is what was promised delivered, probe by probe, on a server that goes on running?

    python -m benchmarks.kept [--probes 10] [--shapes 12x3x3000@120ms ...] [--speculative off auto]

For each shape, streams that run, long prompts that come at once and their length, one server is
started with the ITL SLO behind the "@", and asked again and again: one for each `--speculative`,
which take turns probe by probe. Says in how many probes the P99 of the streams' gaps, while the
prompts were computed, was within the SLO, which share of the gaps was, and what `/health` told of
it. Prints a table and writes kept.json.
"""

import argparse
import asyncio
import json
import re
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.promise import Outcome, Shape, outcome, probe_result
from benchmarks.servers import SERVE, running_server
from legato.cli.values import gap_promise

_SHAPES = ("12x3x3000@120ms", "8x1x7000@120ms", "32x3x4000@200ms")
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)@(.+)")


class Promised(msgspec.Struct, frozen=True):
    """A shape, and the ITL SLO of the server that it is asked of, as typed and in seconds.

    Attributes:
        speculative: of the server, likewise.
    """

    shape: Shape
    speculative: str
    itl_slo: str
    itl_s: float
    quantile: float


class Probed(msgspec.Struct, frozen=True):
    """Of one probe.

    Attributes:
        outcome: None where it took too long.
        within: share of the streams' gaps that were within the SLO; 0 where it took too long.
        health: told after it.
    """

    outcome: Outcome | None
    within: float
    is_kept: bool
    health: dict[str, Any]


def main() -> None:
    arguments = _parse()
    console = Console(highlight=False)
    table = Table("streams", "long prompts", "SLO", "speculative", "kept", "gaps within",
                  "p99, probe by probe", "TTFT, median")  # fmt: skip
    written: list[tuple[Promised, list[Probed]]] = []
    for text in arguments.shapes:
        asked = [_promised(text, speculative) for speculative in arguments.speculative]
        for promised, probed in zip(asked, _measure(console, asked, arguments), strict=True):
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
    parser.add_argument("--speculative", nargs="+", default=["auto"], metavar="auto|off|K")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for a probe")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def _promised(text: str, speculative: str) -> Promised:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise SystemExit(f"{text!r} is not STREAMSxLONGSxTOKENS@SLO")
    num_streams, num_longs, long_prompt = map(int, match.groups()[:3])
    seconds, quantile = gap_promise(match[4])
    shape = Shape(num_streams, long_prompt, num_longs)
    return Promised(shape, speculative, match[4], seconds, quantile)


def _measure(
    console: Console, asked: list[Promised], arguments: argparse.Namespace
) -> list[list[Probed]]:
    """What came of each, in turn."""
    probed: list[list[Probed]] = [[] for _ in asked]
    with console.status(f"{asked[0].shape}: starting") as status, ExitStack() as servers:
        urls = [servers.enter_context(running_server(_command(one))) for one in asked]
        for index in range(arguments.probes):
            for promised, url, own in zip(asked, urls, probed, strict=True):
                status.update(
                    f"{promised.shape}, speculative {promised.speculative}, "
                    f"probe {index + 1} of {arguments.probes}"
                )
                own.append(_probe(promised, url, index, arguments.timeout))
                console.print(promised, own[-1])
    return probed


def _command(promised: Promised) -> str:
    return f"{SERVE} --itl-slo {promised.itl_slo} --speculative {promised.speculative}"


def _probe(promised: Promised, url: str, index: int, timeout_s: float) -> Probed:
    result = asyncio.run(probe_result(url, promised.shape, index, timeout_s))
    if result is None:
        return Probed(None, 0.0, is_kept=False, health=_health(url))
    seen = outcome(result)
    within = float(np.mean(result.itl_s(during=True) <= promised.itl_s))
    return Probed(seen, within, seen.itl_p99_s <= promised.itl_s, _health(url))


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
        promised.speculative,
        f"{sum(each.is_kept for each in probed)} of {len(probed)}",
        f"{np.mean([each.within for each in probed]):.2%}",
        f"{p99s} ms",
        ttft,
    )


if __name__ == "__main__":
    main()
