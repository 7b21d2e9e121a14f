"""What does tracing cost, and does `legato explain` add up to what clients measure?

    python -m benchmarks tracing [--streams 16] [--rounds 14] [--requests 50] ...

Both on one server. First, streams run without pause, and traced windows alternate with untraced
ones; the cost is the ratio of the tokens in both. Then a mixed run is traced, and each request's
TTFT and all its gaps, as `explain` adds them up, are compared with its client's.
"""

import argparse
import asyncio
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import numpy as np

from benchmarks.runner.flags import add_rounds, add_seed, add_server_flags
from benchmarks.runner.main import main
from benchmarks.runner.raw_http import post
from benchmarks.runner.rounds import turns
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE, running_server, with_flags
from legato.cli.table import Table
from legato.observe.traces.attribution import Attribution
from legato.observe.traces.request_story import read_story
from legato_lab.load.token_stream import TokenStream

MINUTES = 4

_SETTLE_S = 0.5
_MAX_TOKEN = 40_000
_READ_BYTES = 2**16


class Measured(msgspec.Struct, frozen=True):
    """A request as its client saw it: when it was sent, when its deliveries came."""

    request_id: str
    sent_s: float
    token_times_s: list[float]


class Compared(msgspec.Struct, frozen=True):
    """Seconds, as the client measured them and as the parts of `explain` add up.

    Attributes:
        e2e_s: from sending to the last token.
        worst_itl_s: the longest gap that the client saw, and the same one as explained.
    """

    ttft_s: tuple[float, float]
    e2e_s: tuple[float, float]
    worst_itl_s: tuple[float, float]


class Cost(msgspec.Struct, frozen=True):
    """Tokens a second in each pair of windows."""

    traced_per_s: list[float]
    untraced_per_s: list[float]

    @property
    def ratios(self) -> np.ndarray:
        ratios: np.ndarray = np.array(self.traced_per_s) / np.array(self.untraced_per_s)
        return ratios


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=16, help="that run without pause")
    add_rounds(parser, 14, "--pairs", help="pairs of windows; 0 measures no cost")
    parser.add_argument("--window", type=float, default=2.5, help="seconds")
    parser.add_argument("--requests", type=int, default=50, help="of the mixed run")
    parser.add_argument("--rate", type=float, default=1.0, help="of the mixed run, a second")
    parser.add_argument("--budget", type=int, default=256)
    add_seed(parser)
    add_server_flags(parser)


def measure(run: Run) -> None:
    fixed = f"{SERVE} --itl-slo off --max-num-batched-tokens {run.flags.budget}"
    command = with_flags(fixed, run.flags.server_flags)
    with run.status("starting") as status, running_server(command) as url:
        status.update("measuring")
        cost, compared = asyncio.run(_measure(url, run.flags))
    if cost is not None:
        run.console.print(_told(cost, run.flags.streams))
    run.show(_table(compared))
    run.write({"cost": cost, "requests": compared})


async def _measure(url: str, flags: argparse.Namespace) -> tuple[Cost | None, list[Compared]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as http:
        cost = await _cost(http, flags) if flags.rounds else None
        measured, trace = await _mixed_run(http, flags)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(trace)
        return cost, [_compare(path, request) for request in measured]


async def _cost(http: httpx.AsyncClient, flags: argparse.Namespace) -> Cost:
    rates: dict[bool, list[float]] = {True: [], False: []}
    async with _streams(http, flags.streams, flags.seed) as token_counts:
        for _, is_traced in turns([True, False], flags.rounds):
            rates[is_traced].append(
                await _window(http, token_counts, flags.window, is_traced=is_traced)
            )
    return Cost(rates[True], rates[False])


async def _window(
    http: httpx.AsyncClient, token_counts: list[int], seconds: float, *, is_traced: bool
) -> float:
    """Tokens a second."""
    if is_traced:
        (await http.post("/trace/start", json={})).raise_for_status()
    await asyncio.sleep(_SETTLE_S)
    begun_s, num_before = time.monotonic(), sum(token_counts)
    await asyncio.sleep(seconds)
    rate = (sum(token_counts) - num_before) / (time.monotonic() - begun_s)
    if is_traced:
        (await http.post("/trace/stop")).raise_for_status()
    return rate


@asynccontextmanager
async def _streams(
    http: httpx.AsyncClient, num_streams: int, seed: int
) -> AsyncIterator[list[int]]:
    """Clients that each ask again when they have their answer; yields how many tokens each of their
    deliveries brings."""
    token_counts: list[int] = []
    rng = random.Random(seed)

    async def client() -> None:
        while True:
            prompt = _prompt(rng, 64)
            # Of all lengths, so that streams that began together do not stay in step with each
            # other, and with the windows.
            num_tokens = rng.randint(32, 256)
            await _complete(http, f"stream-{rng.random()}", prompt, num_tokens, token_counts)

    clients = [asyncio.create_task(client()) for _ in range(num_streams)]
    try:
        while sum(token_counts) < 200 * num_streams:
            await asyncio.sleep(0.1)
        yield token_counts
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def _mixed_run(
    http: httpx.AsyncClient, flags: argparse.Namespace
) -> tuple[list[Measured], bytes]:
    """Short and long prompts and answers, Poisson arrivals; with the run's trace."""
    rng = random.Random(flags.seed)
    (await http.post("/trace/start", json={})).raise_for_status()
    running: list[asyncio.Task[Measured]] = []
    for index in range(flags.requests):
        num_prompt = rng.choice((20, 100, 300, 1000, 2000))
        num_output = rng.choice((8, 32, 64))
        request_id = f"mixed-{index}"
        prompt = _prompt(rng, num_prompt)
        running.append(asyncio.create_task(_complete(http, request_id, prompt, num_output, [])))
        await asyncio.sleep(rng.expovariate(flags.rate))
    measured = await asyncio.gather(*running)
    trace = await http.post("/trace/stop")
    trace.raise_for_status()
    return measured, trace.content


async def _complete(
    http: httpx.AsyncClient,
    request_id: str,
    prompt: list[int],
    num_tokens: int,
    token_counts: list[int],
) -> Measured:
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    token_times_s: list[float] = []
    stream = TokenStream(token_times_s, token_counts)
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    try:
        headers = {"Connection": "close", "X_Request_Id": request_id}
        request = post("/v1/completions", msgspec.json.encode(body), **headers)
        sent_s = time.monotonic()
        writer.write(request)
        while chunk := await reader.read(_READ_BYTES):
            stream.feed(chunk, time.monotonic())
    finally:
        writer.close()
    return Measured(request_id, sent_s, token_times_s)


def _prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(10, _MAX_TOKEN) for _ in range(num_tokens)]


def _compare(trace: Path, measured: Measured) -> Compared:
    attribution = Attribution(read_story(trace, measured.request_id))
    first = attribution.first_token()
    assert first is not None
    gaps = [attribution.gap(index) for index in range(len(measured.token_times_s) - 1)]
    added_s = [sum(span.parts.values()) for span in (first, *gaps)]
    came_s = measured.token_times_s
    seen_s = np.diff(came_s)
    worst = int(seen_s.argmax())
    return Compared(
        ttft_s=(came_s[0] - measured.sent_s, added_s[0]),
        e2e_s=(came_s[-1] - measured.sent_s, sum(added_s)),
        worst_itl_s=(float(seen_s[worst]), added_s[worst + 1]),
    )


def _told(cost: Cost, num_streams: int) -> str:
    error = cost.ratios.std(ddof=1) / math.sqrt(len(cost.ratios))
    return (
        f"{num_streams} streams: {np.mean(cost.untraced_per_s):.1f} tokens/s untraced, "
        f"{np.mean(cost.traced_per_s):.1f} traced; ratio of pairs: median "
        f"{np.median(cost.ratios):.4f}, mean {cost.ratios.mean():.4f} +- {error:.4f}"
    )


def _table(compared: list[Compared]) -> Table:
    header = ["", "median", "error, median", "p95", "largest", "within 1 %", "ms, median",
              "ms, largest"]  # fmt: skip
    rows = []
    for field, name in (("ttft_s", "TTFT"), ("e2e_s", "end to end"), ("worst_itl_s", "worst ITL")):
        seen_s, added_s = np.array([getattr(request, field) for request in compared]).T
        error_s = np.abs(added_s - seen_s)
        error = error_s / seen_s
        rows.append(
            [
                name,
                f"{1e3 * np.median(seen_s):.1f} ms",
                *(f"{np.quantile(error, q):.2%}" for q in (0.5, 0.95, 1.0)),
                f"{int((error <= 0.01).sum())} of {len(error)}",
                f"{1e3 * np.median(error_s):.2f}",
                f"{1e3 * error_s.max():.2f}",
            ]
        )
    return Table(f"{len(compared)} requests, by clients and by `legato explain`", header, rows)


if __name__ == "__main__":
    main("tracing")
