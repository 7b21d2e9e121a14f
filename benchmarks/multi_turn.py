"""What is the prefix cache worth to conversations? Legato with and without it, and any peers.

    python -m benchmarks.multi_turn [--users 8] [--turns 10] [--out out]
                                    [--peer 'NAME=MODEL=COMMAND with {port}' ...]

All users share a system prompt, and each asks the next question some time after the last one was
answered: with --think 0 at once, so that all go on asking at the same time. The hit rate stands
beside the ideal one: that of a cache without end which keeps all blocks of all prompts and answers,
told from the trace of what was sent. Prints a table and writes multi_turn.json.
"""

import argparse
import asyncio
import time
from pathlib import Path
from pydoc_data import topics

import httpx
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.servers import SERVE, add_peer_flag, running_server, servers
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL, CacheConfig
from legato.text.tokenizer import Tokenizer, load_tokenizer

LEGATO = {
    "Legato": SERVE,
    "Legato, no prefix caching": f"{SERVE} --no-enable-prefix-caching",
}
_CHARS_PER_TOKEN = 4
_TIMEOUT_S = 600.0

Message = dict[str, str]


class Answer(msgspec.Struct, frozen=True):
    """One request and what came of it.

    Attributes:
        messages: that were sent.
        num_cached_tokens: None where the server does not tell.
    """

    messages: list[Message]
    text: str
    sent_s: float
    ttft_s: float
    num_prompt_tokens: int
    num_cached_tokens: int | None


class Figures(msgspec.Struct, frozen=True):
    """Attributes: `hit_rate`, `ideal_hit_rate`: cached fraction of all prompt tokens."""

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    first_ttft_mean_s: float
    num_prompt_tokens: int
    hit_rate: float | None
    ideal_hit_rate: float


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class Conversations:
    """What the users say: prose that every Python carries, its own language reference."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.num_users, self.num_turns = arguments.users, arguments.turns
        self.max_tokens = arguments.answer
        pauses = np.random.default_rng(0).exponential(size=(self.num_users, self.num_turns))
        self._pauses_s = arguments.think * pauses
        self._text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        self._question_chars = arguments.question * _CHARS_PER_TOKEN
        self._system_chars = arguments.system * _CHARS_PER_TOKEN

    @property
    def system(self) -> Message:
        return {"role": "system", "content": self._text[: self._system_chars]}

    def pause_s(self, user: int, turn: int) -> float:
        """How long the user reads and types before a turn; as random as Poisson arrivals are."""
        return float(self._pauses_s[user, turn])

    def question(self, user: int, turn: int) -> Message:
        start = self._system_chars + (user * self.num_turns + turn) * self._question_chars
        text = self._text[start : start + self._question_chars]
        return {"role": "user", "content": f"What does this mean?\n{text}"}


async def converse(base_url: str, model: str, conversations: Conversations) -> list[Answer]:
    """Let all users talk at once; their answers in the order in which they asked."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_S, limits=limits) as http:
        warm_up = [{"role": "user", "content": "Hello!"}]
        await _ask(http, model, warm_up, conversations.max_tokens)
        talks = (_talk(http, model, conversations, u) for u in range(conversations.num_users))
        answers = [answer for talk in await asyncio.gather(*talks) for answer in talk]
    return sorted(answers, key=lambda answer: answer.sent_s)


async def _talk(
    http: httpx.AsyncClient, model: str, conversations: Conversations, user: int
) -> list[Answer]:
    messages, answers = [conversations.system], []
    for turn in range(conversations.num_turns):
        await asyncio.sleep(conversations.pause_s(user, turn))
        messages.append(conversations.question(user, turn))
        answer = await _ask(http, model, messages, conversations.max_tokens)
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
    return answers


async def _ask(
    http: httpx.AsyncClient, model: str, messages: list[Message], max_tokens: int
) -> Answer:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, first_s, usage = "", 0.0, None
    sent_s = time.perf_counter()
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            raise SystemExit((await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            event = msgspec.json.decode(line.removeprefix("data:"), type=_Event)
            for choice in event.choices:
                text += choice.delta.content or ""
                if text and not first_s:
                    first_s = time.perf_counter()
            usage = event.usage or usage
    if usage is None or not first_s:
        raise SystemExit("the server answered nothing, or did not tell its usage")
    details = usage.prompt_tokens_details or _PromptDetails()
    return Answer(
        messages=list(messages),
        text=text,
        sent_s=sent_s,
        ttft_s=first_s - sent_s,
        num_prompt_tokens=usage.prompt_tokens,
        num_cached_tokens=details.cached_tokens,
    )


def ideal_hit_rate(answers: list[Answer], tokenizer: Tokenizer, block_size: int) -> float:
    """Share of the prompt tokens in full blocks that an earlier prompt or answer began with."""
    seen: set[tuple[int, ...]] = set()
    num_hits = num_tokens = 0
    for answer in answers:
        prompt = tokenizer.apply_chat_template(answer.messages)
        row = prompt + tokenizer.encode(answer.text)
        ends = range(block_size, len(row), block_size)
        # The last token is computed in any case.
        hits = [end for end in ends if end < len(prompt) and tuple(row[:end]) in seen]
        num_hits += max(hits, default=0)
        num_tokens += len(prompt)
        seen.update(tuple(row[:end]) for end in ends)
    return num_hits / num_tokens


def figures_of(answers: list[Answer], num_users: int, ideal: float) -> Figures:
    ttfts_s = np.array([answer.ttft_s for answer in answers])
    cached = [a.num_cached_tokens for a in answers if a.num_cached_tokens is not None]
    num_prompt_tokens = sum(answer.num_prompt_tokens for answer in answers)
    p50_s, p99_s = np.percentile(ttfts_s, [50, 99]).tolist()
    return Figures(
        ttft_mean_s=float(ttfts_s.mean()),
        ttft_p50_s=p50_s,
        ttft_p99_s=p99_s,
        first_ttft_mean_s=float(ttfts_s[:num_users].mean()),
        num_prompt_tokens=num_prompt_tokens,
        hit_rate=sum(cached) / num_prompt_tokens if cached else None,
        ideal_hit_rate=ideal,
    )


def main() -> None:
    arguments = _parse()
    console = Console(highlight=False)
    conversations = Conversations(arguments)
    tokenizer = load_tokenizer(resolve_source(DEFAULT_MODEL))
    results: dict[str, Figures] = {}
    for name, model, command in servers(LEGATO, arguments.peer):
        with console.status(f"{name}: starting") as status, running_server(command) as base_url:
            status.update(f"measuring {name}")
            answers = asyncio.run(converse(base_url, model, conversations))
        ideal = ideal_hit_rate(answers, tokenizer, arguments.block_size)
        results[name] = figures_of(answers, arguments.users, ideal)
        console.print(name, results[name])
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "multi_turn.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(results))
    )
    console.print(_table(results))
    console.print(f"written to {arguments.out}/multi_turn.json")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--system", type=int, default=1000, help="tokens of it, about")
    parser.add_argument("--question", type=int, default=100, help="tokens of each, about")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each, at most")
    parser.add_argument("--think", type=float, default=1.0, help="seconds between turns, mean")
    parser.add_argument(
        "--block-size", type=int, default=CacheConfig().block_size, help="of the ideal cache"
    )
    parser.add_argument("--out", type=Path, default=Path("out"))
    add_peer_flag(parser)
    return parser.parse_args()


def _table(results: dict[str, Figures]) -> Table:
    base_s = results["Legato, no prefix caching"].ttft_mean_s
    table = Table(
        "server", "TTFT, mean", "p50", "p99", "of the first turn", "to no cache", "hits", "ideal"
    )
    for name, f in results.items():
        table.add_row(
            name,
            *(
                f"{1e3 * seconds:.0f} ms"
                for seconds in (f.ttft_mean_s, f.ttft_p50_s, f.ttft_p99_s, f.first_ttft_mean_s)
            ),
            f"{f.ttft_mean_s / base_s:.2f}x",
            "" if f.hit_rate is None else f"{100 * f.hit_rate:.1f} %",
            f"{100 * f.ideal_hit_rate:.1f} %",
        )
    return table


if __name__ == "__main__":
    main()
