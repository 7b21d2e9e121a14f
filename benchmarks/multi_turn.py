"""What is the prefix cache worth to conversations? Legato with and without it, and any peers.

    python -m benchmarks multi_turn [--users 8] [--turns 10] [--rounds 1]
                                    [--peer 'NAME=MODEL=COMMAND with {port}' ...]

All users share a system prompt, and each asks the next question some time after the last one was
answered: with --think 0 at once, so that all go on asking at the same time. The hit rate stands
beside the ideal one: that of a cache without end which keeps all blocks of all prompts and answers,
told from the trace of what was sent. The table has the answers of all rounds together.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from pydoc_data import topics

import httpx
import msgspec
import numpy as np

from benchmarks.runner.events import stream
from benchmarks.runner.flags import add_peers, add_rounds, add_server_flags
from benchmarks.runner.main import main
from benchmarks.runner.rounds import turns
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE, running_server, servers
from legato.checkpoint.source import resolve_source
from legato.cli.table import Table, duration
from legato.core.cache_config import BLOCK_SIZES
from legato.core.config import DEFAULT_MODEL
from legato.language.conversation.template import ChatTemplates
from legato.language.tokenizer.tokenizer import Tokenizer, load_tokenizer
from legato.observe.distribution import Distribution, distribution
from legato_lab.simulation.record import RequestError

MINUTES = 5

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

    ttft_s: Distribution
    first_ttft_mean_s: float
    num_prompt_tokens: int
    hit_rate: float | None
    ideal_hit_rate: float


class Conversations:
    """What the users say: prose that every Python carries, its own language reference."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.num_users, self.num_turns = flags.users, flags.turns
        self.max_tokens = flags.answer
        pauses = np.random.default_rng(0).exponential(size=(self.num_users, self.num_turns))
        self._pauses_s = flags.think * pauses
        self._text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        self._question_chars = flags.question * _CHARS_PER_TOKEN
        self._system_chars = flags.system * _CHARS_PER_TOKEN

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
    }
    text, first_s, usage = "", 0.0, None
    sent_s = time.perf_counter()
    async for event in stream(http, "/v1/chat/completions", body):
        text += event.added
        if text and not first_s:
            first_s = time.perf_counter()
        usage = event.usage or usage
    if usage is None or not first_s:
        raise RequestError("the server answered nothing, or did not tell its usage")
    return Answer(
        messages=list(messages),
        text=text,
        sent_s=sent_s,
        ttft_s=first_s - sent_s,
        num_prompt_tokens=usage.prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
    )


def ideal_hit_rate(answers: list[Answer], tokenizer: Tokenizer, block_size: int) -> float:
    """Share of the prompt tokens in full blocks that an earlier prompt or answer began with."""
    seen: set[tuple[int, ...]] = set()
    template = ChatTemplates(tokenizer).get()
    num_hits = num_tokens = 0
    for answer in answers:
        rendered = template.render(answer.messages, options={})
        prompt = tokenizer.encode_rendered(rendered.text, rendered.stand_ins)
        row = prompt + tokenizer.encode(answer.text)
        ends = range(block_size, len(row), block_size)
        # The last token is computed in any case.
        hits = [end for end in ends if end < len(prompt) and tuple(row[:end]) in seen]
        num_hits += max(hits, default=0)
        num_tokens += len(prompt)
        seen.update(tuple(row[:end]) for end in ends)
    return num_hits / num_tokens


def figures_of(
    rounds: Sequence[Sequence[Answer]], num_users: int, ideal_rates: Sequence[float]
) -> Figures:
    """Figures of all rounds together; the first turns are those of each round."""
    answers = [answer for one in rounds for answer in one]
    firsts_s = [answer.ttft_s for one in rounds for answer in one[:num_users]]
    ttft_s = distribution(np.array([answer.ttft_s for answer in answers]))
    assert ttft_s is not None
    cached = [a.num_cached_tokens for a in answers if a.num_cached_tokens is not None]
    num_prompt_tokens = sum(answer.num_prompt_tokens for answer in answers)
    return Figures(
        ttft_s=ttft_s,
        first_ttft_mean_s=float(np.mean(firsts_s)),
        num_prompt_tokens=num_prompt_tokens,
        hit_rate=sum(cached) / num_prompt_tokens if cached else None,
        ideal_hit_rate=float(np.mean(ideal_rates)),
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--system", type=int, default=1000, help="tokens of it, about")
    parser.add_argument("--question", type=int, default=100, help="tokens of each, about")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each, at most")
    parser.add_argument("--think", type=float, default=1.0, help="seconds between turns, mean")
    parser.add_argument(
        "--block-size", type=int, default=BLOCK_SIZES["cpu"], help="of the ideal cache"
    )
    add_rounds(parser, 1, help="in each of which every server is started anew")
    add_peers(parser)
    add_server_flags(parser)


def measure(run: Run) -> None:
    flags = run.flags
    conversations = Conversations(flags)
    tokenizer = load_tokenizer(resolve_source(DEFAULT_MODEL))
    sides = servers(LEGATO, flags.peer, flags.server_flags)
    answers: dict[str, list[list[Answer]]] = {side.name: [] for side in sides}
    for number, (name, model, command) in turns(sides, flags.rounds):
        with run.status(f"{name}: starting") as status, running_server(command) as base_url:
            status.update(f"round {number + 1}: measuring {name}")
            answers[name].append(asyncio.run(converse(base_url, model, conversations)))
    results = {
        name: figures_of(
            rounds,
            flags.users,
            [ideal_hit_rate(one, tokenizer, flags.block_size) for one in rounds],
        )
        for name, rounds in answers.items()
    }
    run.show(_table(results))
    run.write(results)


def _table(results: dict[str, Figures]) -> Table:
    base_s = results["Legato, no prefix caching"].ttft_s.mean
    header = ["server", "TTFT, mean", "p50", "p99", "of the first turn", "to no cache", "hits",
              "ideal"]  # fmt: skip
    rows = []
    for name, f in results.items():
        times_s = (f.ttft_s.mean, f.ttft_s.p50, f.ttft_s.p99, f.first_ttft_mean_s)
        hits = "" if f.hit_rate is None else f"{f.hit_rate:.1%}"
        ratio = f"{f.ttft_s.mean / base_s:.2f}x"
        rows.append([name, *map(duration, times_s), ratio, hits, f"{f.ideal_hit_rate:.1%}"])
    return Table("Conversations", header, rows)


if __name__ == "__main__":
    main("multi_turn")
