"""The question that Legato exists for, asked of any OpenAI-compatible server over HTTP.

A few streams decode at a steady pace; then one long prompt arrives. How long do the streams wait
for their next token while it is prefilled?
"""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import msgspec
import numpy as np

_LOWEST_TOKEN = 1000  # below are special tokens and single bytes
_STEADY_TOKENS = 6
_SHORT_PROMPT = 64


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds from the moment the long prompt was sent.

    Attributes:
        token_times_s: for each stream, when its tokens came.
        window_start_s: from when on the steady state was measured (negative).
        ttft_s: when the long prompt's first token came.
    """

    token_times_s: list[list[float]]
    window_start_s: float
    ttft_s: float

    def itl_s(self, *, during: bool) -> np.ndarray:
        """Gaps between tokens while the long prompt was prefilled, or before it came: float [N]."""
        gaps = []
        for times in self.token_times_s:
            for previous, current in itertools.pairwise(times):
                if during and current > 0.0 and previous < self.ttft_s:
                    gaps.append(current - previous)
                if not during and previous >= self.window_start_s and current <= 0.0:
                    gaps.append(current - previous)
        return np.array(gaps)


@dataclass(frozen=True)
class Probe:
    """Settings of one probe.

    Attributes:
        base_url: up to and without "/v1".
        long_prompt: its length in tokens.
        steady_s: how long to watch the streams before it is sent.
    """

    base_url: str
    model: str
    num_streams: int = 8
    long_prompt: int = 7000
    steady_s: float = 4.0
    vocab_size: int = 40_000
    seed: int = 0

    async def run(self) -> ProbeResult:
        """Warm the server up with both shapes, then measure.

        Raises:
            httpx.HTTPStatusError: the server refused a request.
        """
        random_state = random.Random(self.seed)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.base_url, timeout=600, limits=limits) as client:
            for length in (16, self.long_prompt):
                async for _ in self._stream(client, self._prompt(random_state, length), 2):
                    pass
            return await self._measure(client, random_state)

    async def _measure(self, client: httpx.AsyncClient, random_state: random.Random) -> ProbeResult:
        streams: list[list[float]] = [[] for _ in range(self.num_streams)]
        tasks = [
            asyncio.create_task(
                self._decode(client, self._prompt(random_state, _SHORT_PROMPT), times)
            )
            for times in streams
        ]
        try:
            while not all(len(times) >= _STEADY_TOKENS for times in streams):
                await asyncio.sleep(0.01)
                for task in tasks:
                    if task.done():
                        task.result()
            window_start = time.perf_counter()
            await asyncio.sleep(self.steady_s)
            sent = time.perf_counter()
            long_prompt = self._prompt(random_state, self.long_prompt)
            times_s = [at async for at in self._stream(client, long_prompt, 2)]
            await asyncio.sleep(1.0)
        finally:
            for task in tasks:
                task.cancel()
        return ProbeResult(
            token_times_s=[[at - sent for at in times] for times in streams],
            window_start_s=window_start - sent,
            ttft_s=times_s[0] - sent,
        )

    def _prompt(self, random_state: random.Random, length: int) -> list[int]:
        return random_state.choices(range(_LOWEST_TOKEN, self.vocab_size), k=length)

    async def _decode(
        self, client: httpx.AsyncClient, prompt: list[int], times: list[float]
    ) -> None:
        async for at in self._stream(client, prompt, 4000):
            times.append(at)  # noqa: PERF401  seen while it grows

    async def _stream(
        self, client: httpx.AsyncClient, prompt: list[int], max_tokens: int
    ) -> AsyncIterator[float]:
        """Times at which tokens come."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {") and msgspec.json.decode(line[6:])["choices"]:
                    yield time.perf_counter()
