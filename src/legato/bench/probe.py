"""The question that Legato exists for, asked of any OpenAI-compatible server over HTTP.

A few streams decode at a steady pace; then long prompts arrive. How long do the streams wait for
their next token while those are prefilled?
"""

import asyncio
import time
from dataclasses import dataclass

from legato.bench.load.client import Address, Client, connect
from legato.bench.load.record import ProbeResult
from legato.bench.workload.requests import RandomPrompts

__all__ = ["Probe", "ProbeResult"]

_STEADY_TOKENS = 6
_SHORT_PROMPT = 64
_STREAM_TOKENS = 4000  # more than come while they are watched
_LONG_OUTPUT = 2
_WARM_UP_PROMPT = 16
_TAIL_S = 1.0


@dataclass(frozen=True)
class Probe:
    """Settings of one probe.

    Attributes:
        base_url: with or without "/v1".
        model: its name there; None takes the only one.
        long_prompt: length in tokens.
        num_longs: long prompts sent at once.
        steady_s: how long to watch the streams before they are sent.
    """

    base_url: str
    model: str | None = None
    num_streams: int = 8
    long_prompt: int = 7000
    num_longs: int = 1
    steady_s: float = 4.0
    vocab_size: int = 32_000
    seed: int = 0
    api_key: str | None = None

    async def run(self) -> ProbeResult:
        """Warm the server up with both shapes, then measure.

        Raises:
            ConfigError: no server answers there, or it does not serve the model.
            RequestError: the server did not finish a request.
        """
        prompts = RandomPrompts(vocab_size=self.vocab_size, seed=self.seed)
        address = Address(base_url=self.base_url, model=self.model, api_key=self.api_key)
        async with connect(address) as client:
            for length in (_WARM_UP_PROMPT, self.long_prompt):
                await client.complete(prompts.draw(length), _LONG_OUTPUT, [])
            return await self._measure(client, prompts)

    async def _measure(self, client: Client, prompts: RandomPrompts) -> ProbeResult:
        streams: list[list[float]] = [[] for _ in range(self.num_streams)]
        longest = client.model.max_model_len or _STREAM_TOKENS + _SHORT_PROMPT
        num_tokens = min(_STREAM_TOKENS, longest - _SHORT_PROMPT)
        tasks = [
            asyncio.create_task(client.complete(prompts.draw(_SHORT_PROMPT), num_tokens, times))
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
            first_tokens = await self._send_longs(client, prompts)
            await asyncio.sleep(_TAIL_S)
        finally:
            for task in tasks:
                task.cancel()
        return ProbeResult(
            token_times_s=[[at - sent for at in times] for times in streams],
            window_start_s=window_start - sent,
            long_ttfts_s=[at - sent for at in first_tokens],
        )

    async def _send_longs(self, client: Client, prompts: RandomPrompts) -> list[float]:
        """When each of the long prompts had its first token."""
        longs: list[list[float]] = [[] for _ in range(self.num_longs)]
        await asyncio.gather(
            *(
                client.complete(prompts.draw(self.long_prompt), _LONG_OUTPUT, times)
                for times in longs
            )
        )
        return [times[0] for times in longs]
