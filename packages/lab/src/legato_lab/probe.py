"""Measures Legato's central question on any OpenAI-compatible server over HTTP.

A few streams decode at a steady pace; then long prompts arrive. How long do the streams wait for
their next token while the long prompts are prefilled?
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle

from legato.core.errors import ConfigError
from legato_lab.load.client import Address, Client, Completed, ServedModel, connect
from legato_lab.load.vocabulary import prompt_vocab_size
from legato_lab.simulation.record import ProbeResult, RequestError
from legato_lab.simulation.workload import RandomPrompts

__all__ = ["Probe", "ProbeResult"]

_STEADY_TOKENS = 6
_SHORT_PROMPT = 64
_LONG_PROMPT = 7000
_STREAM_TOKENS = 4000  # more than come while they are watched
_LONG_OUTPUT = 2
_WARM_UP_PROMPT = 16
_TAIL_S = 1.0


@dataclass(frozen=True)
class Probe:
    """Settings of one probe.

    Attributes:
        base_url: with or without "/v1".
        model: its name there; None means the only one.
        long_prompt: length in tokens; None means 7,000, or what the model's context holds.
        num_longs: long prompts sent at once.
        slo_classes: classes of service, which the streams have in turn; empty to ask for none.
        steady_s: how long to watch the streams before the long prompts are sent.
        vocab_size: as of `prompt_vocab_size`.
    """

    base_url: str
    model: str | None = None
    num_streams: int = 8
    long_prompt: int | None = None
    num_longs: int = 1
    slo_classes: tuple[str, ...] = ()
    steady_s: float = 4.0
    vocab_size: int | None = None
    seed: int = 0
    api_key: str | None = None

    async def run(self) -> ProbeResult:
        """Warm the server up with both lengths, then measure.

        Raises:
            ConfigError: no server answers there, or it does not serve the model; or the model lacks
                such tokens, or room for such a prompt.
            RequestError: the server did not finish a request, or finished the streams before the
                long prompts.
        """
        address = Address(base_url=self.base_url, model=self.model, api_key=self.api_key)
        async with connect(address) as client:
            long_prompt = self._long_prompt_for(client.model)
            vocab_size = await prompt_vocab_size(client, self.vocab_size)
            prompts = RandomPrompts(vocab_size=vocab_size, seed=self.seed)
            for length in (_WARM_UP_PROMPT, long_prompt):
                await client.complete(prompts.draw(length), _LONG_OUTPUT, [])
            return await self._measure(client, prompts, long_prompt)

    def _long_prompt_for(self, model: ServedModel) -> int:
        """Return the long prompt's length in tokens."""
        if model.max_model_len is None:
            return self.long_prompt or _LONG_PROMPT
        room = model.max_model_len - _LONG_OUTPUT
        if self.long_prompt is not None and self.long_prompt > room:
            raise ConfigError(
                f"a long prompt of {self.long_prompt} tokens and its output of {_LONG_OUTPUT} do "
                f"not fit in the context of {model.id}, which has {model.max_model_len}"
            )
        return self.long_prompt or min(_LONG_PROMPT, room)

    async def _measure(
        self, client: Client, prompts: RandomPrompts, long_prompt: int
    ) -> ProbeResult:
        streams: list[list[float]] = [[] for _ in range(self.num_streams)]
        counts: list[list[int]] = [[] for _ in range(self.num_streams)]
        longest = client.model.max_model_len or _STREAM_TOKENS + _SHORT_PROMPT
        num_tokens = max(1, min(_STREAM_TOKENS, longest - _SHORT_PROMPT))
        classes = [{"slo_class": name} for name in self.slo_classes] or [{}]
        tasks = [
            asyncio.create_task(
                client.complete(
                    prompts.draw(_SHORT_PROMPT), num_tokens, times, asked, token_counts=each
                )
            )
            for times, each, asked in zip(streams, counts, cycle(classes), strict=False)
        ]
        try:
            while not all(len(times) >= _STEADY_TOKENS for times in streams):
                await asyncio.sleep(0.01)
                _check_running(tasks)
            window_start = time.perf_counter()
            await asyncio.sleep(self.steady_s)
            sent = time.perf_counter()
            first_tokens = await self._send_longs(client, prompts, long_prompt)
            _check_running(tasks)
            await asyncio.sleep(_TAIL_S)
        finally:
            for task in tasks:
                task.cancel()
        return ProbeResult(
            token_times_s=[[at - sent for at in times] for times in streams],
            window_start_s=window_start - sent,
            long_ttfts_s=[at - sent for at in first_tokens],
            token_counts=counts,
        )

    async def _send_longs(
        self, client: Client, prompts: RandomPrompts, long_prompt: int
    ) -> list[float]:
        """Send the long prompts; return when each had its first token."""
        longs: list[list[float]] = [[] for _ in range(self.num_longs)]
        await asyncio.gather(
            *(client.complete(prompts.draw(long_prompt), _LONG_OUTPUT, times) for times in longs)
        )
        return [times[0] for times in longs]


def _check_running(streams: Iterable[asyncio.Task[Completed]]) -> None:
    """Raises RequestError if a stream has ended, since it can no longer be watched."""
    for stream in streams:
        if stream.done():
            num_tokens = stream.result().num_tokens
            raise RequestError(
                f"a stream ended after {num_tokens} tokens, before the long prompts were served: "
                "watch for a shorter time, or give the model a longer context"
            )
