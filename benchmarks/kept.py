"""How often is what was promised delivered, probe by probe, on a server that goes on running?

    python -m benchmarks kept [--rounds 10] [--shapes 12x3x3000@120ms ...] [--speculative off auto]

A shape has running streams, long prompts that come at once, their length, and behind the "@" the
ITL SLO of its server. For each shape one server is started for each `--speculative`. They take
turns, probe by probe. Prints in how many probes the P99 of the streams' gaps was within the SLO
while the prompts were computed, and which share of the gaps was. What `/health` said after each
probe is written, too.
"""

import argparse
import asyncio
import json
import re
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np

from benchmarks.runner.flags import add_rounds, add_server_flags
from benchmarks.runner.main import main
from benchmarks.runner.rounds import turns
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE, running_server, with_flags
from legato.cli.table import Table
from legato.cli.values import gap_promise
from legato.core.errors import ConfigError
from legato.lab.probe import Probe, ProbeResult

MINUTES = 14

_SHAPES = ("12x3x3000@120ms", "8x1x7000@120ms", "32x3x4000@200ms")
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)@(.+)")


class Shape(msgspec.Struct, frozen=True):
    """What is asked of a server: streams that run, long prompts that come, and their length."""

    num_streams: int
    long_prompt: int
    num_longs: int


class Promised(msgspec.Struct, frozen=True):
    """A shape, and the ITL SLO of its server, as typed and in seconds.

    Attributes:
        speculative: the server's `--speculative`.
    """

    shape: Shape
    speculative: str
    itl_slo: str
    itl_s: float
    quantile: float


class Outcome(msgspec.Struct, frozen=True):
    """Times of a probe in seconds, while its long prompts were computed.

    Attributes:
        base_s: the streams' median gap before.
        ttft_s: the last long prompt's.
    """

    base_s: float
    itl_p50_s: float
    itl_p99_s: float
    itl_max_s: float
    ttft_s: float

    @classmethod
    def of(cls, result: ProbeResult) -> "Outcome":
        during_s = result.itl_s(during=True)
        base_s = float(np.median(result.itl_s(during=False)))
        p50_s, p99_s, max_s = np.percentile(during_s, [50, 99, 100]).tolist()
        return cls(base_s, p50_s, p99_s, max_s, result.ttft_s)


class Probed(msgspec.Struct, frozen=True):
    """What one probe found.

    Attributes:
        outcome: None where it took too long.
        within: share of the streams' gaps that were within the SLO; 0 where it took too long.
        health: what `/health` said after it.
    """

    outcome: Outcome | None
    within: float
    is_kept: bool
    health: dict[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, 10, "--probes", help="probes of each shape")
    parser.add_argument("--shapes", nargs="+", default=_SHAPES, metavar="STREAMSxLONGSxTOKENS@SLO")
    parser.add_argument("--speculative", nargs="+", default=["auto"], metavar="auto|off|K")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for a probe")
    add_server_flags(parser)


def measure(run: Run) -> None:
    found: list[tuple[Promised, list[Probed]]] = []
    for text in run.flags.shapes:
        sides = [_promised(text, speculative) for speculative in run.flags.speculative]
        found += zip(sides, _probe_all(run, sides), strict=True)
    run.show(_table(found))
    run.write(found)


def _promised(text: str, speculative: str) -> Promised:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not STREAMSxLONGSxTOKENS@SLO")
    num_streams, num_longs, long_prompt = map(int, match.groups()[:3])
    seconds, quantile = gap_promise(match[4])
    shape = Shape(num_streams, long_prompt, num_longs)
    return Promised(shape, speculative, match[4], seconds, quantile)


def _probe_all(run: Run, sides: list[Promised]) -> list[list[Probed]]:
    """Probes of each side, which take turns."""
    found: list[list[Probed]] = [[] for _ in sides]
    with run.status(f"{sides[0].shape}: starting") as status, ExitStack() as running:
        urls = [running.enter_context(running_server(command)) for command in _commands(run, sides)]
        for number, side in turns(range(len(sides)), run.flags.rounds):
            promised = sides[side]
            told = f"{promised.shape}, speculative {promised.speculative}"
            status.update(f"{told}, probe {number + 1} of {run.flags.rounds}")
            found[side].append(_probe(promised, urls[side], number, run.flags.timeout))
            run.tell(f"{told}: {found[side][-1]}")
    return found


def _commands(run: Run, sides: Sequence[Promised]) -> list[str]:
    return [
        with_flags(
            f"{SERVE} --itl-slo {one.itl_slo} --speculative {one.speculative}",
            run.flags.server_flags,
        )
        for one in sides
    ]


def _probe(promised: Promised, url: str, seed: int, timeout_s: float) -> Probed:
    shape = promised.shape
    probe = Probe(
        url,
        num_streams=shape.num_streams,
        long_prompt=shape.long_prompt,
        num_longs=shape.num_longs,
        seed=seed,
    )
    try:
        result = asyncio.run(asyncio.wait_for(probe.run(), timeout_s))
    except TimeoutError:
        return Probed(None, 0.0, is_kept=False, health=_health(url))
    outcome = Outcome.of(result)
    within = float(np.mean(result.itl_s(during=True) <= promised.itl_s))
    return Probed(outcome, within, outcome.itl_p99_s <= promised.itl_s, _health(url))


def _health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/health", timeout=10.0) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def _table(found: Sequence[tuple[Promised, Sequence[Probed]]]) -> Table:
    header = ["streams", "long prompts", "SLO", "speculative", "kept", "gaps within",
              "p99, probe by probe", "TTFT, median"]  # fmt: skip
    return Table("Promises kept", header, [_row(*one) for one in found])


def _row(promised: Promised, probed: Sequence[Probed]) -> list[str]:
    outcomes = [each.outcome for each in probed if each.outcome is not None]
    p99s = ", ".join(f"{1e3 * outcome.itl_p99_s:.0f}" for outcome in outcomes)
    ttft = f"{np.median([o.ttft_s for o in outcomes]):.1f} s" if outcomes else "none in time"
    return [
        str(promised.shape.num_streams),
        f"{promised.shape.num_longs} of {promised.shape.long_prompt:,}",
        promised.itl_slo,
        promised.speculative,
        f"{sum(each.is_kept for each in probed)} of {len(probed)}",
        f"{np.mean([each.within for each in probed]):.2%}",
        f"{p99s} ms",
        ttft,
    ]


if __name__ == "__main__":
    main("kept")
