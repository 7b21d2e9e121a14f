"""Does one long prompt freeze the running streams? Legato's policies, and any peers, in one run.

    python -m benchmarks stall [--streams 8] [--long 7000] [--rounds 1]
                               [--peer 'NAME=MODEL=COMMAND with {port}' ...]

Starts one server after the other and asks each the same question (`legato_lab.probe`). Prints a
table of all rounds and draws the last one.
"""

import argparse
import asyncio
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from benchmarks.runner.flags import add_peers, add_rounds, add_server_flags
from benchmarks.runner.main import main
from benchmarks.runner.rounds import turns
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE_AS_PEERS_DO, running_server, servers
from legato.cli.table import Table, duration
from legato_lab.probe import Probe, ProbeResult

MINUTES = 4

_FIXED = "--itl-slo off --max-num-batched-tokens"
LEGATO = {
    name: f"{SERVE_AS_PEERS_DO} {flags}"
    for name, flags in {
        "Legato, --itl-slo 100ms": "--itl-slo 100ms",
        "Legato, budget 128": f"{_FIXED} 128",
        "Legato, budget 512": f"{_FIXED} 512",
        "Legato, prefill-first 512": f"{_FIXED} 512 --policy prefill-first",
        "Legato, whole prompts": "--itl-slo off --no-enable-chunked-prefill",
    }.items()
}

Results = dict[str, list[ProbeResult]]
"""Key the server's name, value what each round had."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--long", type=int, default=7000, help="tokens of the long prompt")
    add_rounds(parser, 1, help="in each of which every server is started and asked")
    add_peers(parser)
    add_server_flags(parser)


def measure(run: Run) -> None:
    flags = run.flags
    sides = servers(LEGATO, flags.peer, flags.server_flags)
    results: Results = {side.name: [] for side in sides}
    for number, (name, model, command) in turns(sides, flags.rounds):
        with run.status(f"{name}: starting") as status, running_server(command) as base_url:
            status.update(f"round {number + 1}: measuring {name}")
            probe = Probe(
                base_url,
                model,
                num_streams=flags.streams,
                long_prompt=flags.long,
                seed=number,
            )
            results[name].append(asyncio.run(probe.run()))
    run.picture(_plot({name: own[-1] for name, own in results.items()}, flags))
    run.show(_table(results))
    run.write(results)


def _table(results: Results) -> Table:
    header = ["server", "ITL before, p50", "during, p50", "p99", "max", "long prompt's TTFT"]
    return Table("One long prompt", header, [_row(name, own) for name, own in results.items()])


def _row(name: str, rounds: Sequence[ProbeResult]) -> list[str]:
    before, during = (
        np.concatenate([one.itl_s(during=during) for one in rounds]) for during in (False, True)
    )
    ttft_s = np.median([one.ttft_s for one in rounds])
    waits_s = (np.median(before), *np.percentile(during, [50, 99]), during.max(), ttft_s)
    return [name, *(duration(float(wait_s)) for wait_s in waits_s)]


def _plot(results: dict[str, ProbeResult], flags: argparse.Namespace) -> Figure:
    figure, axes = plt.subplots(
        len(results), 1, figsize=(9, 1.15 * len(results) + 1.0), sharex=True, sharey=True
    )
    for axis, (name, result) in zip(np.atleast_1d(axes), results.items(), strict=True):
        axis.axvspan(0, result.ttft_s, color="#f2d7a0", alpha=0.6, linewidth=0)
        for times in result.token_times_s:
            axis.plot(times[1:], np.diff(times), ".", markersize=3.5, color="#1f5fa8")
        longest_s = float(result.itl_s(during=True).max())
        axis.set_title(f"{name}: longest wait {duration(longest_s)}", loc="left", fontsize=9)
        axis.set_yscale("log")
        axis.set_ylim(0.008, 8.0)
        axis.set_yticks([0.01, 0.1, 1.0], minor=False)
        axis.yaxis.set_major_formatter(lambda value, _: _tick(value))
        axis.tick_params(labelsize=8)
        axis.grid(axis="y", alpha=0.3)
    axis.set_xlim(-2.0, max(result.ttft_s for result in results.values()) + 1.0)
    axis.set_xlabel("seconds since the long prompt was sent (shaded: until its first token)")
    figure.suptitle(
        f"{flags.streams} running streams while a prompt of {flags.long:,} tokens is computed\n"
        "Each dot is a token: how long its stream had waited for it",
        fontsize=11,
    )
    figure.tight_layout()
    return figure


def _tick(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1.0 else f"{seconds:.0f} s"


if __name__ == "__main__":
    main("stall")
