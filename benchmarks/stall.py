"""Does one long prompt freeze the running streams? Legato's policies, and any peers, in one run.

    python -m benchmarks.stall [--out out] [--peer 'NAME=MODEL=COMMAND with {port}' ...]

Starts one server after the other, asks each the same question (`legato.lab.probe`), prints a
table and writes stall.json and stall.png.
"""

import argparse
import asyncio
from pathlib import Path

import matplotlib.pyplot as plt
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.servers import SERVE_AS_PEERS_DO, add_peer_flag, running_server, servers
from legato.lab.probe import Probe, ProbeResult

LEGATO = {
    name: f"{SERVE_AS_PEERS_DO} {flags}"
    for name, flags in {
        "Legato, --itl-slo 100ms": "--itl-slo 100ms",
        "Legato, budget 128": "--max-num-batched-tokens 128",
        "Legato, budget 512": "--max-num-batched-tokens 512",
        "Legato, prefill-first 512": "--max-num-batched-tokens 512 --policy prefill-first",
        "Legato, whole prompts": "--no-enable-chunked-prefill",
    }.items()
}


def main() -> None:
    arguments = _parse()
    console = Console()
    results: dict[str, ProbeResult] = {}
    for name, model, command in servers(LEGATO, arguments.peer):
        with console.status(f"{name}: starting"), running_server(command) as base_url:
            probe = Probe(
                base_url, model, num_streams=arguments.streams, long_prompt=arguments.long
            )
            console.print(f"measuring {name}")
            results[name] = asyncio.run(probe.run())
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "stall.json").write_bytes(msgspec.json.encode(results))
    _plot(results, arguments.out / "stall.png", arguments.streams, arguments.long)
    console.print(_table(results))
    console.print(f"written to {arguments.out}/stall.json and stall.png")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--long", type=int, default=7000, help="tokens of the long prompt")
    parser.add_argument("--out", type=Path, default=Path("out"))
    add_peer_flag(parser)
    return parser.parse_args()


def _table(results: dict[str, ProbeResult]) -> Table:
    table = Table("server", "ITL before, p50", "during, p50", "p99", "max", "long prompt's TTFT")
    for name, result in results.items():
        before, during = result.itl_s(during=False), result.itl_s(during=True)
        waits_s = (np.median(before), *np.percentile(during, [50, 99]), during.max())
        table.add_row(name, *map(_duration, waits_s), f"{result.ttft_s:.1f} s")
    return table


def _plot(results: dict[str, ProbeResult], path: Path, num_streams: int, long: int) -> None:
    figure, axes = plt.subplots(
        len(results), 1, figsize=(9, 1.15 * len(results) + 1.0), sharex=True, sharey=True
    )
    for axis, (name, result) in zip(np.atleast_1d(axes), results.items(), strict=True):
        axis.axvspan(0, result.ttft_s, color="#f2d7a0", alpha=0.6, linewidth=0)
        for times in result.token_times_s:
            axis.plot(times[1:], np.diff(times), ".", markersize=3.5, color="#1f5fa8")
        longest_s = result.itl_s(during=True).max()
        axis.set_title(f"{name}: longest wait {_duration(longest_s)}", loc="left", fontsize=9)
        axis.set_yscale("log")
        axis.set_ylim(0.008, 8.0)
        axis.set_yticks([0.01, 0.1, 1.0], minor=False)
        axis.yaxis.set_major_formatter(lambda value, _: _duration(value))
        axis.tick_params(labelsize=8)
        axis.grid(axis="y", alpha=0.3)
    axis.set_xlim(-2.0, max(result.ttft_s for result in results.values()) + 1.0)
    axis.set_xlabel("seconds since the long prompt was sent (shaded: until its first token)")
    figure.suptitle(
        f"{num_streams} running streams while a prompt of {long:,} tokens is computed\n"
        "Each dot is a token: how long its stream had waited for it",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1.0 else f"{seconds:.1f} s"


if __name__ == "__main__":
    main()
