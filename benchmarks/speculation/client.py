"""Streams of one server. Each asks again as soon as it has an answer."""

import asyncio
import itertools
import re
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import httpx
import msgspec
import numpy as np

from benchmarks.runner.events import stream
from benchmarks.speculation.workloads import Asked, Completion
from legato_lab.simulation.record import RequestError

_TIMEOUT = httpx.Timeout(600.0, connect=60.0)
_NO_LIMITS = httpx.Limits(max_connections=None)
_COUNTED = re.compile(r"^\w+:spec_decode_num_(draft|accepted)_tokens_total(?:\{.*\})? (\S+)", re.M)
"""Legato and vLLM call them alike."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one side in one round.

    Attributes:
        num_tokens: that came within `seconds`.
        seconds: while all streams ran.
        num_deliveries: events with text; each holds one token or several.
        tpot_s: the median over answers of the time between tokens.
        slowest_tpot_s: the same of the stream with the longest.
        itl_p50_s: of gaps between deliveries within them, as is `itl_p99_s`.
        num_drafted: tokens; None, as is `num_accepted`, where the server does not tell.
        answers: a checksum of each.
        others_cpu_share: processors' time that all other sides' servers took, idle as they are,
            of what one processor has.
    """

    num_tokens: int
    seconds: float
    num_deliveries: int
    tpot_s: float
    slowest_tpot_s: float
    itl_p50_s: float
    itl_p99_s: float
    num_drafted: int | None
    num_accepted: int | None
    answers: list[int]
    others_cpu_share: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Delivery(NamedTuple):
    """Attributes: at_s: by `time.perf_counter()`; num_tokens: of the answer, with those before."""

    at_s: float
    num_tokens: int


class Answer(msgspec.Struct, frozen=True):
    """Attributes: deliveries: one at least."""

    text: str
    deliveries: list[Delivery]

    @property
    def tpot_s(self) -> float:
        first, last = self.deliveries[0], self.deliveries[-1]
        return (last.at_s - first.at_s) / max(1, last.num_tokens - first.num_tokens)


class Client:
    """A server that streams ask.

    Args:
        model: its name there.
    """

    def __init__(self, base_url: str, model: str) -> None:
        self._base_url, self._model = base_url, model

    def measure(self, streams: Sequence[Sequence[Asked]]) -> Figures:
        """Have all streams run at once; whole blocks of their prompts are computed beforehand.

        Raises:
            RequestError: a request was not answered in full.
        """
        return asyncio.run(self._measure(streams))

    async def _measure(self, streams: Sequence[Sequence[Asked]]) -> Figures:
        async with httpx.AsyncClient(
            base_url=self._base_url, timeout=_TIMEOUT, limits=_NO_LIMITS
        ) as http:
            await asyncio.gather(
                *(self._ask_all(http, asked, is_warm_up=True) for each in streams for asked in each)
            )
            before = await _drafts(http)
            answers = await asyncio.gather(*(self._stream(http, each) for each in streams))
            after = await _drafts(http)
        return _figures(answers, before, after)

    async def _stream(self, http: httpx.AsyncClient, asks: Sequence[Asked]) -> list[Answer]:
        return [answer for asked in asks for answer in await self._ask_all(http, asked)]

    async def _ask_all(
        self, http: httpx.AsyncClient, asked: Asked, *, is_warm_up: bool = False
    ) -> list[Answer]:
        """Of a conversation, all turns; to warm up, one token of the first."""
        if isinstance(asked, Completion):
            fields = {"prompt": asked.token_ids, "temperature": 1, "seed": asked.seed}
            num_tokens = 1 if is_warm_up else asked.num_tokens
            return [await self._ask(http, "/v1/completions", fields, num_tokens)]
        messages: list[dict[str, str]] = []
        answers: list[Answer] = []
        for question, length in asked.turns[:1] if is_warm_up else asked.turns:
            messages.append({"role": "user", "content": question})
            fields = {"messages": messages, "temperature": 0}
            num_tokens = 1 if is_warm_up else length
            answers.append(await self._ask(http, "/v1/chat/completions", fields, num_tokens))
            messages.append({"role": "assistant", "content": answers[-1].text})
        return answers

    async def _ask(
        self, http: httpx.AsyncClient, path: str, fields: dict[str, object], num_tokens: int
    ) -> Answer:
        body = {
            "model": self._model,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **fields,
        }
        parts: list[str] = []
        deliveries: list[Delivery] = []
        num_counted = 0
        async for event in stream(http, path, body):
            num_counted = event.usage.completion_tokens if event.usage else num_counted
            if text := event.added:
                parts.append(text)
                deliveries.append(Delivery(time.perf_counter(), num_counted))
        if num_counted != num_tokens:
            raise RequestError(f"{num_counted} tokens came of {num_tokens}")
        return Answer("".join(parts), deliveries)


async def _drafts(http: httpx.AsyncClient) -> dict[str, int]:
    """So far, "draft" and "accepted" ones; neither where the server does not tell."""
    response = await http.get("/metrics")
    return counted(response.text) if response.is_success else {}


def counted(metrics: str) -> dict[str, int]:
    """Drafted and accepted tokens in a page of metrics, summed over the labels."""
    found: dict[str, int] = {}
    for name, value in _COUNTED.findall(metrics):
        found[name] = found.get(name, 0) + int(float(value))
    return found


def _figures(
    streams: Sequence[Sequence[Answer]], before: dict[str, int], after: dict[str, int]
) -> Figures:
    """Args: streams: answers of each."""
    begun_s, ended_s = all_run(streams)
    itl_p50_s, itl_p99_s = np.percentile(gaps_s(streams), [50, 99])
    num_drafts = {name: count - before.get(name, 0) for name, count in after.items()}
    answers = [answer for stream in streams for answer in stream]
    counts = [
        later.num_tokens - earlier_tokens
        for answer in answers
        for earlier_tokens, later in zip(
            [0, *(delivery.num_tokens for delivery in answer.deliveries)],
            answer.deliveries,
            strict=False,
        )
        if begun_s < later.at_s <= ended_s
    ]
    return Figures(
        num_tokens=sum(counts),
        seconds=ended_s - begun_s,
        num_deliveries=len(counts),
        tpot_s=float(np.median([answer.tpot_s for answer in answers])),
        slowest_tpot_s=max(float(np.mean([a.tpot_s for a in stream])) for stream in streams),
        itl_p50_s=float(itl_p50_s),
        itl_p99_s=float(itl_p99_s),
        num_drafted=num_drafts.get("draft"),
        num_accepted=num_drafts.get("accepted"),
        answers=[zlib.crc32(answer.text.encode()) for answer in answers],
    )


def all_run(streams: Sequence[Sequence[Answer]]) -> tuple[float, float]:
    """From when to when all streams run: before, ends of prompts are computed.

    Raises:
        RuntimeError: one ended before another began.
    """
    begun_s = max(stream[0].deliveries[0].at_s for stream in streams)
    ended_s = min(stream[-1].deliveries[-1].at_s for stream in streams)
    if ended_s <= begun_s:
        raise RuntimeError("a stream ended before all had begun")
    return begun_s, ended_s


def gaps_s(streams: Sequence[Sequence[Answer]]) -> list[float]:
    """Between deliveries, while all streams run."""
    begun_s, ended_s = all_run(streams)
    return [
        later.at_s - earlier.at_s
        for stream in streams
        for answer in stream
        for earlier, later in itertools.pairwise(answer.deliveries)
        if begun_s <= earlier.at_s and later.at_s <= ended_s
    ]
