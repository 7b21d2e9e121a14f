"""How often is what was promised delivered, probe by probe, on a server that goes on running?

    python -m benchmarks kept [--rounds 10] [--shapes 12x3x3000@120ms ...] [--speculative off auto]
                              [--budgets 80 96 ...] [--busy-share 0.1]

A shape has running streams, long prompts that come at once, their length, and after the "@" the
ITL SLO of its server. Of `8x2x1500@120ms+300ms`, every second stream is of a class of its own, with
the second SLO; a probe is kept if both are. For each shape one server is started for each
`--speculative`, and one without an SLO and without drafts for each of `--budgets`, tokens a step.
They take turns, probe by probe. Prints in how many probes the P99 of the streams' gaps was within
the SLO while the prompts were computed, and which share of the gaps was. With `--busy-share`,
another process takes this share of one core meanwhile. What `/health` said after each probe is
written, too.
"""

import argparse
import asyncio
import json
import re
import urllib.request
from collections.abc import Iterable, Sequence
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
from legato_lab.probe import Probe, ProbeResult

MINUTES = 14

_SHAPES = ("12x3x3000@120ms", "8x1x7000@120ms", "32x3x4000@200ms")
_FIXED = ("--itl-slo", "off", "--max-num-batched-tokens")
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
        slo_classes: that the streams ask for, in turn; empty for a fixed budget.
        itl_slos: as typed, of each class; or what a server with a fixed budget is judged by.
        itl_s: the same in seconds.
    """

    shape: Shape
    name: str
    flags: tuple[str, ...]
    slo_classes: tuple[str, ...]
    itl_slos: tuple[str, ...]
    itl_s: tuple[float, ...]


class Outcome(msgspec.Struct, frozen=True):
    """Times of a probe in seconds, while its long prompts were computed.

    Attributes:
        base_s: the streams' median gap before.
        itl_p50_s, itl_p99_s, itl_max_s: of the streams of each class.
        ttft_s: the last long prompt's.
    """

    base_s: float
    itl_p50_s: tuple[float, ...]
    itl_p99_s: tuple[float, ...]
    itl_max_s: tuple[float, ...]
    ttft_s: float

    @classmethod
    def of(cls, result: ProbeResult, gaps_s: Sequence[np.ndarray]) -> "Outcome":
        base_s = float(np.median(result.itl_s(during=False)))
        quantiles_s = [np.percentile(gaps, [50, 99, 100]).tolist() for gaps in gaps_s]
        p50_s, p99_s, longest_s = zip(*quantiles_s, strict=True)
        return cls(base_s, p50_s, p99_s, longest_s, result.ttft_s)


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
    shape, slos = Shape(num_streams, long_prompt, num_longs), tuple(match[4].split("+"))
    classes = {"interactive": slos[0]}
    classes |= {f"class-{i}": slo for i, slo in enumerate(slos[1:], start=2)}
    promises = ["--itl-slo", slos[0]]
    for name, slo in [*classes.items()][1:]:
        promises += ["--slo-class", f"{name}:itl={slo}"]
    promising = {
        f"{match[4]}, drafts {drafts}": (*promises, "--speculative", drafts)
        for drafts in speculative
    }
    fixed = {
        f"{budget} tokens a step": (*_FIXED, str(budget), *_WITHOUT_DRAFTS) for budget in budgets
    }
    seconds = tuple(gap_promise(slo)[0] for slo in slos)
    asked = tuple(classes) if len(slos) > 1 else ()
    return [
        *(Side(shape, name, flags, asked, slos, seconds) for name, flags in promising.items()),
        *(Side(shape, name, flags, (), slos, seconds) for name, flags in fixed.items()),
    ]


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
        slo_classes=side.slo_classes,
        seed=seed,
    )
    try:
        result = asyncio.run(asyncio.wait_for(probe.run(), timeout_s))
    except TimeoutError:
        return Probed(None, 0.0, is_kept=False, health=_health(url))
    every = len(side.itl_s)
    gaps_s = [result.itl_s(during=True, streams=slice(i, None, every)) for i in range(every)]
    outcome = Outcome.of(result, gaps_s)
    is_within = [gaps <= slo_s for gaps, slo_s in zip(gaps_s, side.itl_s, strict=True)]
    is_kept = all(
        p99_s <= slo_s for p99_s, slo_s in zip(outcome.itl_p99_s, side.itl_s, strict=True)
    )
    return Probed(outcome, float(np.mean(np.concatenate(is_within))), is_kept, _health(url))


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
    p50_s = np.median([outcome.itl_p50_s for outcome in outcomes], axis=0) if outcomes else ()
    p99s = ", ".join(_ms(outcome.itl_p99_s) for outcome in outcomes)
    return [
        str(side.shape.num_streams),
        f"{side.shape.num_longs} of {side.shape.long_prompt:,}",
        "+".join(side.itl_slos),
        side.name,
        f"{sum(each.is_kept for each in probed)} of {len(probed)}",
        f"{np.mean([each.within for each in probed]):.2%}",
        f"{_ms(p50_s)} ms" if outcomes else "none in time",
        f"{p99s} ms",
        f"{np.median([o.ttft_s for o in outcomes]):.2f} s" if outcomes else "none in time",
    ]


def _ms(seconds: Iterable[float]) -> str:
    return "+".join(f"{1e3 * each:.0f}" for each in seconds)


if __name__ == "__main__":
    main("kept")
