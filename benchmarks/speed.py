"""How fast are decode, prefill and offline throughput, beside other servers in the same run?

    python -m benchmarks.speed [--peer 'NAME=MODEL=COMMAND with {port}' ...] [--out out]

Starts one server after the other: Legato with its own kernels, with PyTorch's, and any peers.
Prints each server's figures and their ratio to the last one's, and writes speed.json.
"""

import argparse
import asyncio
import time
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.servers import SERVE_AS_PEERS_DO, add_peer_flag, running_server, servers
from legato.lab.load.client import Address, Client, connect
from legato.simulation.workload import RandomPrompts

LEGATO = {
    "Legato": SERVE_AS_PEERS_DO,
    "Legato, PyTorch kernels": f"{SERVE_AS_PEERS_DO} --kernels torch",
}
NUM_STREAMS = (1, 8, 32, 64)
PROMPTS = (512, 2000, 7000)
OFFLINE = ((64, 512, 128), (64, 1000, 13))  # (requests, prompt, output)
_DECODED = 60
_REPEATS = 3

Figures = dict[str, float]
"""Key what was measured, value in seconds, or tokens a second."""


def main() -> None:
    arguments = _parse()
    console = Console(highlight=False)
    results: dict[str, Figures] = {}
    for name, model, command in servers(LEGATO, arguments.peer):
        with console.status(f"{name}: starting") as status, running_server(command) as base_url:
            status.update(f"measuring {name}")
            results[name] = asyncio.run(_measure(Address(base_url=base_url, model=model)))
        console.print(name, results[name])
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "speed.json").write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    console.print(_table(results))
    console.print(f"written to {arguments.out}/speed.json")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    add_peer_flag(parser)
    return parser.parse_args()


async def _measure(address: Address) -> Figures:
    prompts = RandomPrompts(vocab_size=32_000, seed=0)
    figures: Figures = {}
    async with connect(address) as client:
        for length in (16, *PROMPTS):
            await client.complete(prompts.draw(length), 2, [])  # warms up
        for count in NUM_STREAMS:
            figures[f"ITL of {count} streams"] = await _itl_s(client, prompts, count)
        for length in PROMPTS:
            figures[f"TTFT of {length:,} tokens"] = await _ttft_s(client, prompts, length)
        for count, length, num_tokens in OFFLINE:
            name = f"output tokens/s, {count} x {length:,} in, {num_tokens} out"
            figures[name] = await _tokens_a_s(client, prompts, count, length, num_tokens)
    return figures


async def _itl_s(client: Client, prompts: RandomPrompts, num_streams: int) -> float:
    """The median between tokens that come while all streams run."""
    streams: list[list[float]] = [[] for _ in range(num_streams)]
    await asyncio.gather(*(client.complete(prompts.draw(64), _DECODED, t) for t in streams))
    begun_s, ended_s = max(t[0] for t in streams), min(t[-1] for t in streams)
    gaps_s = [
        gap_s
        for times in streams
        for gap_s, at_s in zip(np.diff(times), times, strict=False)
        if begun_s <= at_s < ended_s
    ]
    return float(np.median(gaps_s))


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


def _table(results: dict[str, Figures]) -> Table:
    *_, last = results.values()
    table = Table("", *results)
    for name in last:
        cells = [f"{_told(name, f[name])} ({f[name] / last[name]:.2f}x)" for f in results.values()]
        table.add_row(name, *cells)
    return table


def _told(name: str, value: float) -> str:
    return f"{value:.0f}" if "tokens/s" in name else f"{1e3 * value:.1f} ms"


if __name__ == "__main__":
    main()
