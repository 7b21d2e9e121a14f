"""How often is what was promised delivered, probe by probe, on a server that goes on running?

    python -m benchmarks kept [--rounds 10] [--shapes 12x3x3000@120ms ...] [--speculative off auto]
                              [--budgets 80 96 ...] [--busy-share 0.1]

A shape has running streams, long prompts that come at once, their length, and after the "@" the
ITL SLO of its server. For each shape one server is started for each `--speculative`, and one
without an SLO and without drafts for each of `--budgets`, tokens a step. They take turns, probe by
probe. Prints in how many probes the P99 of the streams' gaps was within the SLO while the prompts
were computed, and which share of the gaps was. With `--busy-share`, another process takes this
share of one core meanwhile. What `/health` said after each probe is written, too.
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
from benchmarks.runner.interference import spinning
from benchmarks.runner.machine import settle
from benchmarks.runner.main import main
from benchmarks.runner.rounds import turns
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE, running_server, with_flags
from legato.cli.table import Table
from legato.cli.values import count, gap_promise
from legato.core.errors import ConfigError
from legato.lab.probe import Probe, ProbeResult

MINUTES = 14

_SHAPES = ("12x3x3000@120ms", "8x1x7000@120ms", "32x3x4000@200ms")
_WITHOUT_DRAFTS = ("--speculative", "off")
_FIRST_CALM_S, _CALM_S = 8.0, 1.0
"""Time without work before a probe. A server measures its steps again after five idle seconds."""
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)@(.+)")


class Shape(msgspec.Struct, frozen=True):
    """What is asked of a server: streams that run, long prompts that come, and their length."""

    num_streams: int
    long_prompt: int
    num_longs: int


class Side(msgspec.Struct, frozen=True):
    """A server, and what its streams are held to.

    Attributes:
        name: of the server, in tables.
        flags: of `legato serve`.
        itl_slo: as typed; the SLO of the server, or what one with a fixed budget is judged by.
        itl_s: the same in seconds.
    """

    shape: Shape
    name: str
    flags: tuple[str, ...]
    itl_slo: str
    itl_s: float


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
    parser.add_argument(
        "--budgets", nargs="+", type=count, default=[], metavar="TOKENS", help="fixed ones, beside"
    )
    parser.add_argument(
        "--busy-share", type=float, default=0.0, metavar="SHARE", help="of a core, of another's"
    )
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for a probe")
    add_server_flags(parser)


def measure(run: Run) -> None:
    found: list[tuple[Side, list[Probed]]] = []
    flags = run.flags
    with spinning(1 if flags.busy_share else 0, flags.busy_share):
        for text in flags.shapes:
            sides = _sides(text, flags.speculative, flags.budgets)
            found += zip(sides, _probe_all(run, sides), strict=True)
    run.show(_table(found))
    run.write(found)


def _sides(text: str, speculative: Sequence[str], budgets: Sequence[int]) -> list[Side]:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not STREAMSxLONGSxTOKENS@SLO")
    num_streams, num_longs, long_prompt = map(int, match.groups()[:3])
    shape, slo = Shape(num_streams, long_prompt, num_longs), match[4]
    servers = {
        f"{slo}, drafts {drafts}": ("--itl-slo", slo, "--speculative", drafts)
        for drafts in speculative
    } | {
        f"{budget} tokens a step": ("--max-num-batched-tokens", str(budget), *_WITHOUT_DRAFTS)
        for budget in budgets
    }
    seconds, _ = gap_promise(slo)
    return [Side(shape, name, flags, slo, seconds) for name, flags in servers.items()]


def _probe_all(run: Run, sides: list[Side]) -> list[list[Probed]]:
    """Probes of each side, which take turns."""
    found: list[list[Probed]] = [[] for _ in sides]
    with run.status(f"{sides[0].shape}: starting") as status, ExitStack() as running:
        commands = [with_flags(SERVE, (*side.flags, *run.flags.server_flags)) for side in sides]
        urls = [running.enter_context(running_server(command)) for command in commands]
        for number, index in turns(range(len(sides)), run.flags.rounds):
            side = sides[index]
            told = f"{side.shape}, {side.name}"
            status.update(f"{told}, probe {number + 1} of {run.flags.rounds}")
            settle(_CALM_S if number else _FIRST_CALM_S, run.flags.busy_share)
            found[index].append(_probe(side, urls[index], number, run.flags.timeout))
            run.tell(f"{told}: {found[index][-1]}")
    return found


def _probe(side: Side, url: str, seed: int, timeout_s: float) -> Probed:
    shape = side.shape
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
    within = float(np.mean(result.itl_s(during=True) <= side.itl_s))
    return Probed(outcome, within, outcome.itl_p99_s <= side.itl_s, _health(url))


def _health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/health", timeout=10.0) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def _table(found: Sequence[tuple[Side, Sequence[Probed]]]) -> Table:
    header = ["streams", "long prompts", "SLO", "server", "kept", "gaps within", "p50, median",
              "p99, probe by probe", "TTFT, median"]  # fmt: skip
    return Table("Promises kept", header, [_row(*one) for one in found])


def _row(side: Side, probed: Sequence[Probed]) -> list[str]:
    outcomes = [each.outcome for each in probed if each.outcome is not None]
    p50_s = [outcome.itl_p50_s for outcome in outcomes]
    p99s = ", ".join(f"{1e3 * outcome.itl_p99_s:.0f}" for outcome in outcomes)
    return [
        str(side.shape.num_streams),
        f"{side.shape.num_longs} of {side.shape.long_prompt:,}",
        side.itl_slo,
        side.name,
        f"{sum(each.is_kept for each in probed)} of {len(probed)}",
        f"{np.mean([each.within for each in probed]):.2%}",
        f"{1e3 * np.median(p50_s):.0f} ms" if outcomes else "none in time",
        f"{p99s} ms",
        f"{np.median([o.ttft_s for o in outcomes]):.2f} s" if outcomes else "none in time",
    ]


if __name__ == "__main__":
    main("kept")
