"""What do prefill and decode apart bring, beside one process and beside two that do both?

    python -m benchmarks disaggregation [--tokens 1000] [--interval 12] [--rounds 2]
                                        [flags of `legato serve`]

Streams decode while long prompts come one after the other. Each set of servers has the same two
cores, the same requests at the same times, and must give the same tokens. Each round starts all of
them anew, one after the other.
"""

import argparse
import asyncio
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
from matplotlib.figure import Figure

from benchmarks.runner.events import Event, stream
from benchmarks.runner.flags import add_rounds, add_server_flags
from benchmarks.runner.main import main
from benchmarks.runner.rounds import turns
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE, running_server, with_flags
from legato.cli.table import Table, duration

MINUTES = 12

_CHARACTERS_PER_TOKEN = 5.0
"""At least, in the documentation that prompts are made of."""
_LONG_OUTPUT = 32
_STREAM_OUTPUT = 400
_STEADY_S = 3.0
_SHORT_CHARACTERS = 200


class Answer(msgspec.Struct):
    """Times are seconds from the begin of its round."""

    name: str
    sent_s: float
    token_times_s: list[float] = []
    token_ids: list[int] = []
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s


class Round(msgspec.Struct):
    """Attributes: `longs` are the answers to long prompts, `streams` those beside them."""

    longs: list[Answer]
    streams: list[Answer]


class Servers(NamedTuple):
    """Where requests go: request i to server i of `urls` in turn.

    Attributes:
        prefill: the server that computes their prompts, where that is another one; with the port
            at which it gives blocks.
    """

    urls: list[str]
    prefill: tuple[str, int] | None = None


class Load(NamedTuple):
    """Attributes: `interval_s` is the time from one long prompt to the next."""

    num_streams: int
    num_prompts: int
    num_tokens: int
    interval_s: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=4, help="that run all the time")
    parser.add_argument("--prompts", type=int, default=8, help="long ones in a round")
    parser.add_argument("--tokens", type=int, default=1000, help="of a long prompt, about")
    parser.add_argument("--interval", type=float, default=12.0, help="seconds between them")
    add_rounds(parser, 2)
    default = ("--dtype", "float32", "--itl-slo", "200ms", "--no-shed-load")
    add_server_flags(parser, default)


def measure(run: Run) -> None:
    flags = run.flags
    load = Load(flags.streams, flags.prompts, flags.tokens, flags.interval)
    results: dict[str, list[Round]] = {name: [] for name in _SETS}
    for number, name in turns(list(_SETS), flags.rounds):
        run.tell(f"round {number + 1}: {name}")
        with _SETS[name](flags.server_flags) as servers:
            results[name].append(asyncio.run(_measure(servers, load)))
    run.picture(_plot(results, load))
    run.show(_table(results))
    run.write(results)


@contextmanager
def _one(flags: Sequence[str]) -> Iterator[Servers]:
    with running_server(_command(None, ("--num-threads", "2", *flags))) as url:
        yield Servers([url])


@contextmanager
def _two(flags: Sequence[str]) -> Iterator[Servers]:
    with ExitStack() as stack:
        commands = [_command(core, ("--num-threads", "1", *flags)) for core in (0, 1)]
        yield Servers([stack.enter_context(running_server(command)) for command in commands])


@contextmanager
def _apart(flags: Sequence[str]) -> Iterator[Servers]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    common = ("--num-threads", "1", *flags)
    sends = (*common, "--kv-role", "prefill", "--kv-transfer-port", str(port))
    fetches = (*common, "--kv-role", "decode", "--kv-transfer-peers", f"127.0.0.1:{port}")
    with (
        running_server(_command(0, sends)) as prefill,
        running_server(_command(1, fetches)) as decode,
    ):
        yield Servers([decode], (prefill, port))


_SETS = {
    "one process": _one,
    "two processes": _two,
    "prefill + decode": _apart,
}


def _command(core: int | None, flags: Sequence[str]) -> str:
    """To serve on one of the two cores, or on both."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    own = cores if core is None else [cores[core]]
    return with_flags(f"taskset -c {','.join(map(str, own))} {SERVE}", flags)


async def _measure(servers: Servers, load: Load) -> Round:
    texts = _Texts()
    long, short = int(load.num_tokens * _CHARACTERS_PER_TOKEN), _SHORT_CHARACTERS
    first_long = load.num_streams
    first_unmeasured = first_long + load.num_prompts
    async with httpx.AsyncClient(timeout=None) as client:
        asker = _Asker(client, servers, load.num_tokens)
        for i in range(len(servers.urls)):
            await asker.ask(i, f"warm-up {i}", texts.text(first_unmeasured + i, long), 2)
        asker.begin()
        watched = [
            asyncio.create_task(_keep_streaming(asker, i, texts.text(i, short)))
            for i in range(load.num_streams)
        ]
        await asyncio.sleep(_STEADY_S)
        longs = []
        for i in range(load.num_prompts):
            asked = asker.ask(i, f"long {i}", texts.text(first_long + i, long), _LONG_OUTPUT)
            longs.append(asyncio.create_task(asked))
            await asyncio.sleep(load.interval_s)
        answers = [await task for task in longs]
        for task in watched:
            task.cancel()
        await asyncio.gather(*watched, return_exceptions=True)
        return Round(answers, asker.streams)


class _Texts:
    """Prompts of the documentation. No two begin alike."""

    def __init__(self) -> None:
        files = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
        self._text = "\n".join(path.read_text(encoding="utf-8") for path in files)

    def text(self, index: int, num_characters: int) -> str:
        start = (index + 1) * 7919 % (len(self._text) - num_characters)
        return f"{index}. {self._text[start : start + num_characters]}"


class _Asker:
    """Asks for answers as a router does.

    Attributes:
        streams: what came of streams, whether they ended or not.
    """

    def __init__(self, client: httpx.AsyncClient, servers: Servers, most_tokens: int) -> None:
        self.streams: list[Answer] = []
        self._client = client
        self._servers = servers
        self._most_tokens = most_tokens
        self._begun_s = time.monotonic()

    def begin(self) -> None:
        """Times count from now on."""
        self._begun_s = time.monotonic()

    async def ask(
        self, index: int, name: str, prompt: str, max_tokens: int, *, is_stream: bool = False
    ) -> Answer:
        body: dict[str, Any] = {
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "truncate_prompt_tokens": self._most_tokens,
        }
        answer = Answer(name, self._now_s())
        if is_stream:
            self.streams.append(answer)
        urls, prefill = self._servers
        url, asked = urls[index % len(urls)], body | {"max_tokens": max_tokens}
        if prefill is None:
            await self._read(url, asked, answer)
            return answer
        # Both at once, so that blocks are fetched while the prompt is computed.
        prefill_url, port = prefill
        transfer_id = f"{name} {self._begun_s}"
        sends = {"do_remote_decode": True, "transfer_id": transfer_id}
        fetches = {
            "do_remote_prefill": True,
            "remote_host": "127.0.0.1",
            "remote_port": port,
            "transfer_id": transfer_id,
            "is_early": True,
        }
        computed = body | {"max_tokens": 1, "kv_transfer_params": sends}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._prefill(prefill_url, computed))
            group.create_task(self._read(url, asked | {"kv_transfer_params": fetches}, answer))
        return answer

    async def _prefill(self, url: str, body: dict[str, Any]) -> None:
        response = await self._client.post(f"{url}/v1/completions", json=body)
        response.raise_for_status()

    async def _read(self, url: str, body: dict[str, Any], answer: Answer) -> None:
        asked = body | {"return_token_ids": True}
        async for event in stream(self._client, f"{url}/v1/completions", asked):
            self._take(event, answer)

    def _take(self, event: Event, answer: Answer) -> None:
        for choice in event.choices:
            token_ids = choice.token_ids or []
            answer.token_ids += token_ids
            answer.token_times_s += [self._now_s()] * len(token_ids)
        if event.usage is not None:
            answer.num_prompt_tokens = event.usage.prompt_tokens
            answer.num_cached_tokens = event.usage.num_cached_tokens or 0

    def _now_s(self) -> float:
        return time.monotonic() - self._begun_s


async def _keep_streaming(asker: _Asker, index: int, prompt: str) -> None:
    for i in range(1_000_000):
        await asker.ask(
            index, f"stream {index}.{i}", f"{i} {prompt}", _STREAM_OUTPUT, is_stream=True
        )


def _ttfts_s(rounds: list[Round]) -> list[float]:
    return [answer.ttft_s for one in rounds for answer in one.longs]


def _gaps_s(rounds: list[Round]) -> list[float]:
    """Between deliveries of all streams, and of the answers to long prompts, from the first of
    these on."""
    gaps: list[float] = []
    for one in rounds:
        since_s = min(answer.sent_s for answer in one.longs)
        for answer in [*one.streams, *one.longs]:
            times_s = sorted({at_s for at_s in answer.token_times_s if at_s >= since_s})
            gaps += [after - before for before, after in pairwise(times_s)]
    return gaps


def _num_same(rounds: list[Round], others: list[Round]) -> tuple[int, int]:
    """Answers with the same tokens as far as both go, and how many there are."""
    num_same = num_both = 0
    for one, other in zip(rounds, others, strict=True):
        expected = {a.name: a.token_ids for a in [*other.longs, *other.streams]}
        for answer in [*one.longs, *one.streams]:
            length = min(len(answer.token_ids), len(expected.get(answer.name, [])))
            num_both += length > 0
            num_same += length > 0 and answer.token_ids[:length] == expected[answer.name][:length]
    return num_same, num_both


def _table(results: dict[str, list[Round]]) -> Table:
    header = ["", "TTFT p50", "max", "ITL p50", "p99", "max", "tokens/s", "cached", "same tokens"]
    first = next(iter(results.values()))
    rows = [_row(name, rounds, first) for name, rounds in results.items()]
    return Table("Prefill and decode, together and apart", header, rows)


def _row(name: str, rounds: list[Round], first: list[Round]) -> list[str]:
    ttfts_s, gaps_s = _ttfts_s(rounds), _gaps_s(rounds)
    longs = [answer for one in rounds for answer in one.longs]
    cached = np.mean([answer.num_cached_tokens / answer.num_prompt_tokens for answer in longs])
    num_same, num_both = _num_same(rounds, first)
    times_s = (np.median(ttfts_s), max(ttfts_s), *np.percentile(gaps_s, [50, 99]), max(gaps_s))
    return [
        name,
        *(duration(float(seconds)) for seconds in times_s),
        f"{np.mean([_rate(one) for one in rounds]):.1f}",
        f"{cached:.0%}",
        f"{num_same} of {num_both}",
    ]


def _rate(one: Round) -> float:
    """Tokens a second, from the first long prompt to the end of the last."""
    since_s = min(answer.sent_s for answer in one.longs)
    until_s = max(answer.token_times_s[-1] for answer in one.longs)
    times_s = [at_s for answer in [*one.streams, *one.longs] for at_s in answer.token_times_s]
    return sum(since_s <= at_s <= until_s for at_s in times_s) / (until_s - since_s)


def _plot(results: dict[str, list[Round]], load: Load) -> Figure:
    figure = Figure(figsize=(9.5, 3.8), layout="tight")
    left, right = figure.subplots(1, 2)
    for name, rounds in results.items():
        for axis, values in ((left, _ttfts_s(rounds)), (right, _gaps_s(rounds))):
            shares = np.arange(1, len(values) + 1) / len(values)
            axis.step(np.sort(values), shares, where="post", label=name, linewidth=1.6)
    left.set_title(f"TTFT of prompts of {load.num_tokens:,} tokens", loc="left", fontsize=10)
    right.set_title("Gaps between tokens meanwhile", loc="left", fontsize=10)
    left.set_ylabel("share of them")
    right.set_xlim(left=0)
    for axis in (left, right):
        axis.set_xlabel("seconds")
        axis.grid(alpha=0.3)
    right.legend(fontsize=8, loc="lower right")
    figure.suptitle(
        f"{load.num_streams} streams, and a long prompt every {load.interval_s:g} s: two cores",
        fontsize=11,
    )
    return figure


if __name__ == "__main__":
    main("disaggregation")
