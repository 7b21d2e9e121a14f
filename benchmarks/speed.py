"""How fast are decode, prefill and offline throughput, beside other servers in the same run?

    python -m benchmarks speed [--rounds 1] [--peer 'NAME=MODEL=COMMAND with {port}' ...]

Starts one server after the other: Legato with its own kernels, with PyTorch's, and any peers. With
several rounds, figures are medians of them. Prints each server's figures and their ratio to the
last one's. `--no-torch` leaves PyTorch's kernels out, and `--no-offline` throughput. Legato drafts
nothing, as peers do by default; `--drafts` measures it with drafts, too. ITL is the median gap
between two events of a stream, which drafts lengthen; the time per token is what a stream's user
waits for a token on average.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.runner.flags import add_peers, add_rounds, add_server_flags
from benchmarks.runner.main import main
from benchmarks.runner.rounds import turns
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE_AS_PEERS_DO, running_server, servers
from legato.cli.table import Table
from legato_lab.load.client import Address, Client, connect
from legato_lab.simulation.workload import RandomPrompts

MINUTES = 8

LEGATO = {"Legato": f"{SERVE_AS_PEERS_DO} --speculative off"}
ON_TORCH = {"Legato, PyTorch kernels": f"{SERVE_AS_PEERS_DO} --speculative off --kernels torch"}
DRAFTING = {"Legato, drafts": f"{SERVE_AS_PEERS_DO} --speculative auto"}
NUM_STREAMS = (1, 8, 32, 64)
PROMPTS = (512, 2000, 7000)
OFFLINE = ((64, 512, 128), (64, 1000, 13))  # (requests, prompt, output)
_DECODED = 60
_REPEATS = 3

Figures = dict[str, float]
"""Key what was measured, value in seconds, or tokens a second."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, 1, help="in each of which every server is started and measured")
    parser.add_argument("--streams", type=int, nargs="+", default=NUM_STREAMS, metavar="N")
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS, metavar="TOKENS")
    parser.add_argument("--drafts", action="store_true", help="Legato with drafts, too")
    parser.add_argument(
        "--torch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Legato with PyTorch's kernels, too",
    )
    parser.add_argument(
        "--offline", action=argparse.BooleanOptionalAction, default=True, help="throughput, too"
    )
    add_peers(parser)
    add_server_flags(parser)


def measure(run: Run) -> None:
    flags = run.flags
    legato = (DRAFTING if flags.drafts else {}) | LEGATO | (ON_TORCH if flags.torch else {})
    sides = servers(legato, flags.peer, flags.server_flags)
    found: dict[str, list[Figures]] = {side.name: [] for side in sides}
    for number, (name, model, command) in turns(sides, flags.rounds):
        with (
            run.status(f"round {number + 1}: {name}, starting") as status,
            running_server(command) as url,
        ):
            status.update(f"round {number + 1}: measuring {name}")
            address = Address(base_url=url, model=model)
            found[name].append(asyncio.run(_measure(address, flags)))
        run.tell(f"{name} {found[name][-1]}")
    results = {name: _medians(rounds) for name, rounds in found.items()}
    run.show(_table(results))
    run.write({"medians": results, "rounds": found})


async def _measure(address: Address, flags: argparse.Namespace) -> Figures:
    prompts = RandomPrompts(vocab_size=32_000, seed=0)
    figures: Figures = {}
    async with connect(address) as client:
        for length in (16, *flags.prompts):
            await client.complete(prompts.draw(length), 2, [])  # warms up
        for count in flags.streams:
            itl_s, token_s = await _decode_s(client, prompts, count)
            figures[f"ITL of {count} streams"] = itl_s
            figures[f"time per token of {count} streams"] = token_s
        for length in flags.prompts:
            figures[f"TTFT of {length:,} tokens"] = await _ttft_s(client, prompts, length)
        for count, length, num_tokens in OFFLINE if flags.offline else ():
            name = f"output tokens/s, {count} x {length:,} in, {num_tokens} out"
            figures[name] = await _tokens_a_s(client, prompts, count, length, num_tokens)
    return figures


async def _decode_s(
    client: Client, prompts: RandomPrompts, num_streams: int
) -> tuple[float, float]:
    """Return the median gap between events, and the mean time per token of the median stream.

    Both are of the time in which all streams run.
    """
    streams: list[list[float]] = [[] for _ in range(num_streams)]
    await asyncio.gather(*(client.complete(prompts.draw(64), _DECODED, t) for t in streams))
    begun_s, ended_s = max(t[0] for t in streams), min(t[-1] for t in streams)
    together = [[at_s for at_s in times if begun_s <= at_s <= ended_s] for times in streams]
    # Tokens of one event have the same time.
    gaps_s = [gap_s for times in together for gap_s in np.diff(times) if gap_s > 0.0]
    tokens_s = [(times[-1] - times[0]) / (len(times) - 1) for times in together if len(times) > 1]
    return float(np.median(gaps_s)), float(np.median(tokens_s))


async def _ttft_s(client: Client, prompts: RandomPrompts, length: int) -> float:
    ttfts_s = []
    for _ in range(_REPEATS):
        times_s: list[float] = []
        sent_s = time.perf_counter()
        await client.complete(prompts.draw(length), 1, times_s)
        ttfts_s.append(times_s[0] - sent_s)
    return min(ttfts_s)


async def _tokens_a_s(
    client: Client, prompts: RandomPrompts, count: int, length: int, num_tokens: int
) -> float:
    sent_s = time.perf_counter()
    await asyncio.gather(
        *(client.complete(prompts.draw(length), num_tokens, []) for _ in range(count))
    )
    return count * num_tokens / (time.perf_counter() - sent_s)


def _medians(rounds: Sequence[Figures]) -> Figures:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def _table(results: dict[str, Figures]) -> Table:
    *_, last = results.values()
    rows = [
        [name, *(f"{_told(name, f[name])} ({f[name] / last[name]:.2f}x)" for f in results.values())]
        for name in last
    ]
    return Table("Speed, and its ratio to the last server's", ["", *results], rows)


def _told(name: str, value: float) -> str:
    return f"{value:.0f}" if "tokens/s" in name else f"{1e3 * value:.1f} ms"


if __name__ == "__main__":
    main("speed")
