"""Does an ITL SLO hold while long prompts are computed, and what does it cost their TTFT?

    python -m benchmarks.promise [--streams 8 32] [--prompts 1000 4000 7000] [--longs 1 3] ...

For each number of streams, SLOs are multiples of the ITL that the streams have alone. Beside them
run servers with fixed token budgets, of which for each shape the one is shown that keeps the SLO
with the earliest first token of the long prompts. Prints a table and writes promise.json.
"""

import argparse
import asyncio
import itertools
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.servers import SERVE, running_server
from legato.lab.probe import Probe, ProbeResult


class Shape(msgspec.Struct, frozen=True):
    """What is asked of a server: streams that run, long prompts that come, and their length."""

    num_streams: int
    long_prompt: int
    num_longs: int


class Outcome(msgspec.Struct, frozen=True):
    """Of one probe, in seconds; None where the long prompts had no first token in time.

    Attributes:
        itl_p99_s: while the long prompts were computed.
        ttft_s: of the last of them.
    """

    base_s: float
    itl_p50_s: float
    itl_p99_s: float
    itl_max_s: float
    ttft_s: float


Outcomes = dict[Shape, list[Outcome | None]]


def main() -> None:
    arguments = _parse()
    console = Console(highlight=False)
    table = Table("streams", "long prompts", "SLO", "ITL p50", "p99", "max", "TTFT",
                  "best fixed budget", "its p99", "its TTFT")  # fmt: skip
    written = []
    for num_streams in arguments.streams:
        shapes = [
            Shape(num_streams, length, longs)
            for length, longs in itertools.product(arguments.prompts, arguments.longs)
        ]
        fixed = {
            budget: _measure(console, f"budget {budget}", f"--max-num-batched-tokens {budget}",
                             shapes, 1, arguments.timeout)
            for budget in arguments.budgets
        }  # fmt: skip
        base_s = arguments.base or _base_s(fixed)
        for multiple in arguments.multiples:
            slo_s = multiple * base_s
            kept = _measure(console, f"SLO {1e3 * slo_s:.0f} ms", f"--itl-slo {slo_s:.4f}s",
                            shapes, arguments.runs, arguments.timeout)  # fmt: skip
            for shape in shapes:
                best = _best_fixed({b: o[shape][0] for b, o in fixed.items()}, slo_s)
                for outcome in kept[shape]:
                    _add_row(table, shape, slo_s, multiple, outcome, best)
                    written.append((shape, multiple, slo_s, outcome, best))
            console.print(table)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "promise.json").write_bytes(msgspec.json.encode(written))
    console.print(f"written to {arguments.out}/promise.json")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1000, 4000, 7000])
    parser.add_argument("--longs", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--multiples", type=float, nargs="+", default=[1.5, 3.0, 6.0])
    parser.add_argument("--budgets", type=int, nargs="*", default=[32, 64, 128, 256, 512])
    parser.add_argument("--base", type=float, help="the streams' ITL alone, if not measured")
    parser.add_argument("--runs", type=int, default=1, help="probes of each shape and SLO")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for a probe")
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    if not arguments.budgets and arguments.base is None:
        parser.error("without --budgets there is nothing to measure --base with")
    return arguments


def _measure(
    console: Console, name: str, flags: str, shapes: list[Shape], runs: int, timeout_s: float
) -> Outcomes:
    outcomes: Outcomes = {}
    with console.status(f"{name}: starting") as status, running_server(f"{SERVE} {flags}") as url:
        for shape in shapes:
            outcomes[shape] = []
            for run in range(runs):
                status.update(f"{name}: {shape}, run {run + 1} of {runs}")
                outcomes[shape].append(asyncio.run(probe(url, shape, run, timeout_s)))
                console.print(name, shape, outcomes[shape][-1])
    return outcomes


async def probe(url: str, shape: Shape, seed: int, timeout_s: float) -> Outcome | None:
    """Ask a server once; None where the long prompts have no first token in time."""
    result = await probe_result(url, shape, seed, timeout_s)
    return None if result is None else outcome(result)


async def probe_result(url: str, shape: Shape, seed: int, timeout_s: float) -> ProbeResult | None:
    """The same, with all that was seen."""
    asked = Probe(
        url,
        num_streams=shape.num_streams,
        long_prompt=shape.long_prompt,
        num_longs=shape.num_longs,
        seed=seed,
    )
    try:
        return await asyncio.wait_for(asked.run(), timeout_s)
    except TimeoutError:
        return None


def outcome(result: ProbeResult) -> Outcome:
    during_s = result.itl_s(during=True)
    p50_s, p99_s = np.percentile(during_s, [50, 99])
    base_s = np.median(result.itl_s(during=False))
    return Outcome(float(base_s), float(p50_s), float(p99_s), float(during_s.max()), result.ttft_s)


def _base_s(fixed: dict[int, Outcomes]) -> float:
    outcomes = [o for of in fixed.values() for runs in of.values() for o in runs if o is not None]
    return float(np.median([outcome.base_s for outcome in outcomes]))


def _best_fixed(outcomes: dict[int, Outcome | None], slo_s: float) -> tuple[int, Outcome] | None:
    """The budget that keeps the SLO with the earliest first token, if any does."""
    keeps = [(b, o) for b, o in outcomes.items() if o is not None and o.itl_p99_s <= slo_s]
    return min(keeps, key=lambda kept: kept[1].ttft_s, default=None)


def _add_row(
    table: Table,
    shape: Shape,
    slo_s: float,
    multiple: float,
    outcome: Outcome | None,
    best: tuple[int, Outcome] | None,
) -> None:
    told = ["none in time"] * 4
    if outcome is not None:
        times_s = (outcome.itl_p50_s, outcome.itl_p99_s, outcome.itl_max_s)
        told = [*map(_ms, times_s), f"{outcome.ttft_s:.1f} s"]
    fixed = ["none keeps it", "", ""]
    if best is not None:
        fixed = [str(best[0]), _ms(best[1].itl_p99_s), f"{best[1].ttft_s:.1f} s"]
    table.add_row(
        str(shape.num_streams),
        f"{shape.num_longs} of {shape.long_prompt:,}",
        f"{_ms(slo_s)} ({multiple:g}x)",
        *told,
        *fixed,
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


if __name__ == "__main__":
    main()
