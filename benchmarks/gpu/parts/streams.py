"""End to end: streams with a promise, long prompts beside them, and a batch as fast as it goes."""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from benchmarks.gpu.figures import Report, Row
from benchmarks.gpu.settings import Settings
from legato import AsyncLLM
from legato.core.sampling_params import SamplingParams
from legato.llm.prompts import TokensPrompt

_STEADY_DELIVERIES = 16


TITLE = "Streams end to end"


def run(settings: Settings, report: Report) -> None:
    report.note(
        "Of `AsyncLLM`, as its caller has the tokens: scheduler, two processes and the way "
        "between them included. Long prompts come one after the other while the streams run."
    )
    asyncio.run(_run(settings, report))


def run_batch(settings: Settings, report: Report) -> None:
    """The batch alone, without a promise."""
    asyncio.run(_run_batch(settings, report))


async def _run_batch(settings: Settings, report: Report) -> None:
    async with AsyncLLM.from_engine_args(settings.engine(), skip_tokenizer_init=True) as llm:
        traffic = _Traffic(llm, settings)
        await traffic.complete(settings.sizes.prompt, 2)  # warms up
        report.add(await traffic.batch("no promise"))


async def _run(settings: Settings, report: Report) -> None:
    begun_s = time.perf_counter()
    llm = AsyncLLM.from_engine_args(
        settings.engine(itl_slo_s=settings.itl_slo_s), skip_tokenizer_init=True
    )
    async with llm:
        started_s = time.perf_counter() - begun_s
        traffic = _Traffic(llm, settings)
        await traffic.complete(settings.sizes.prompt, 2)  # warms up
        report.add(Row(name="start, measuring step times included", value=started_s, unit="s"))
        report.add(*await traffic.probe())
        report.add(await traffic.batch("beside a promise"))


class _Traffic:
    def __init__(self, llm: AsyncLLM, settings: Settings) -> None:
        self._llm = llm
        self._settings = settings
        self._prompts = settings.prompts

    async def probe(self) -> list[Row]:
        sizes = self._settings.sizes
        streams: list[list[float]] = [[] for _ in range(sizes.probe_streams)]
        async with self._decoding(streams):
            calm_s = time.perf_counter()
            await asyncio.sleep(sizes.probe_s / 4)
            while not all(len(_gaps_ms([times], calm_s, math.inf)) for times in streams):
                await asyncio.sleep(0.01)
            begun_s = time.perf_counter()
            ttfts_s = await self._long_prompts(begun_s + 3 * sizes.probe_s / 4)
            ended_s = time.perf_counter()
        calm, loaded = _gaps_ms(streams, calm_s, begun_s), _gaps_ms(streams, begun_s, ended_s)
        slo_s = self._settings.itl_slo_s
        who = f"{sizes.probe_streams} streams"
        return [
            Row(name=f"median gap of {who}", value=float(np.median(calm)), unit="ms"),
            Row(
                name=f"median beside prompts of {sizes.prompt:,}",
                value=float(np.median(loaded)),
                unit="ms",
            ),
            Row(
                name="P99 beside them",
                value=float(np.quantile(loaded, 0.99)),
                unit="ms",
                limit=None if slo_s is None else 1e3 * slo_s,
            ),
            Row(name="longest beside them", value=float(loaded.max()), unit="ms"),
            Row(name="prompts' median TTFT", value=1e3 * float(np.median(ttfts_s)), unit="ms"),
            Row(
                name="prompt tokens beside the streams",
                value=len(ttfts_s) * sizes.prompt / (ended_s - begun_s),
                unit="tokens/s",
            ),
        ]

    async def batch(self, promise: str) -> Row:
        """Many requests at once, as fast as they go."""
        count, prompt, output = self._settings.sizes.batch
        begun_s = time.perf_counter()
        await asyncio.gather(*(self.complete(prompt, output) for _ in range(count)))
        return Row(
            name=f"output of {count} x {prompt:,} in, {output} out, at once, {promise}",
            value=count * output / (time.perf_counter() - begun_s),
            unit="tokens/s",
        )

    async def complete(
        self, prompt: int, num_tokens: int, times_s: list[float] | None = None
    ) -> None:
        """One request; `times_s` gets when each of its deliveries came."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        tokens = TokensPrompt(prompt_token_ids=self._prompts.draw(prompt))
        num_so_far = 0
        async for generation in self._llm.generate(tokens, params):
            num_before, num_so_far = num_so_far, len(generation.outputs[0].token_ids)
            if times_s is not None and num_so_far > num_before:
                times_s.append(time.perf_counter())

    async def _long_prompts(self, until_s: float) -> list[float]:
        """Their TTFTs; at least one."""
        ttfts_s: list[float] = []
        while not ttfts_s or time.perf_counter() < until_s:
            sent_s, times_s = time.perf_counter(), list[float]()
            await self.complete(self._settings.sizes.prompt, 2, times_s)
            ttfts_s.append(times_s[0] - sent_s)
        return ttfts_s

    @asynccontextmanager
    async def _decoding(self, streams: list[list[float]]) -> AsyncIterator[None]:
        """While they all run."""
        sizes = self._settings.sizes
        tasks = [
            asyncio.create_task(self.complete(sizes.context, sizes.probe_tokens, times))
            for times in streams
        ]
        try:
            while not all(len(times) >= _STEADY_DELIVERIES for times in streams):
                await asyncio.sleep(0.01)
                _raise_of_ended(tasks)
            yield
            _raise_of_ended(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _raise_of_ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
            raise RuntimeError("a stream ended while it was watched: give it a longer context")


def _gaps_ms(streams: list[list[float]], begun_s: float, ended_s: float) -> np.ndarray:
    """Gaps between deliveries, if the second came in that time."""
    gaps = [
        1e3 * (later - earlier)
        for times in streams
        for earlier, later in itertools.pairwise(times)
        if begun_s <= later < ended_s
    ]
    return np.array(gaps)
