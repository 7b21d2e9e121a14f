"""Steps of the model on the executor alone: decodes, a prompt, and both at once."""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence

import torch

from benchmarks.gpu.figures import Report, Row
from benchmarks.gpu.parts.ceilings import known_roofline
from benchmarks.gpu.settings import Settings
from legato.core.config import Quantization
from legato.core.plan import ScheduledChunk
from legato.core.sampling_params import SamplingParams
from legato.engine.build.builder import load_runtime
from legato.engine.build.runtime import ModelRuntime
from legato.model.spec import DecoderSpec
from legato.scheduler.step_shape import StepShape
from legato_lab.made_up_steps import MadeUpSteps, TimedStep
from legato_lab.work import operators_of

_WARM_UP = 5
_SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=0, max_tokens=10_000)
_NAME_CHARS, _MOST_KERNELS = 80, 20
_DECODE_TARGET, _PREFILL_TARGET, _MIXED_TARGET = 1.2, 1.4, 1.15


TITLE = "Steps of the model"


def run(settings: Settings, report: Report) -> None:
    begun_s = time.perf_counter()
    runtime = load_runtime(settings.engine())
    loaded_s = time.perf_counter() - begun_s
    report.add(Row(name="loading and capture", value=loaded_s, unit="s"))
    of_runtime(settings, runtime, report)


def of_runtime(settings: Settings, runtime: ModelRuntime, report: Report) -> None:
    """Of a model that is loaded."""
    measured = _Measured(settings, runtime)
    measured.fill()
    report.note(
        "The roofline is that of one operator after the other: of each, the longer of reading "
        "and multiplying. Steps are timed on the host, from one result to the next."
    )
    report.note(f"KV cache: {measured.num_cache_tokens:,} tokens.")
    for count in settings.sizes.streams:
        report.add(measured.decode(count))
    if settings.sizes.has_variants:
        report.add(measured.decode(settings.sizes.mixed_streams, depth=1))
        report.add(measured.decode(settings.sizes.mixed_streams, params=_SAMPLED))
    for chunk in settings.sizes.chunks:
        report.add(measured.prefill(chunk))
    for chunk in settings.sizes.mixed:
        report.add(measured.mixed(chunk))
    report.note(measured.kernels(settings.sizes.mixed[-1]))


def of_quantized(settings: Settings, quantization: Quantization, report: Report) -> None:
    """Decodes alone, whose time is that of reading weights and cache."""
    measured = _Measured(settings, load_runtime(settings.engine(quantization=quantization)))
    measured.fill()
    report.note("The roofline is of the bytes that these weights have.")
    for count in settings.sizes.quantized:
        report.add(measured.decode(count))


class _Measured:
    def __init__(self, settings: Settings, runtime: ModelRuntime) -> None:
        self._sizes = settings.sizes
        self._roofline = known_roofline(settings)
        self._runtime = runtime
        self._steps = MadeUpSteps(runtime)
        self.num_cache_tokens = self._steps.num_cache_tokens

    def fill(self) -> None:
        sizes = self._sizes
        num_tokens = max(sizes.streams) * (sizes.context + sizes.decoded) + sizes.prompt
        num_tokens = min(num_tokens, self.num_cache_tokens)
        self._steps.fill(num_tokens, prompt=sizes.prompt, chunk=max(sizes.chunks))

    def decode(
        self, count: int, *, depth: int | None = None, params: SamplingParams | None = None
    ) -> Row:
        """ITL of so many streams."""
        steps = self._decodes(count, self._sizes.decoded, params)
        timed = self._steps.run_all(steps, depth=depth)
        self._steps.end()
        how = "" if depth is None else f", {depth} step in flight"
        how += "" if params is None else ", sampled with top-k and top-p"
        return Row(
            name=f"ITL of {_streams(count)} at {self._sizes.context:,}{how}",
            value=1e3 * _median_s(timed),
            unit="ms",
            least=1e3 * self._least_s(steps[len(steps) // 2]),
            target=_DECODE_TARGET,
        )

    def prefill(self, chunk: int) -> Row:
        """Tokens a second of a long prompt alone."""
        sizes = self._sizes
        times_s, least_s = [], 0.0
        for _ in range(3):
            self._add("prompt", 0, known=sizes.prompt, room=sizes.prompt)
            steps = [
                [self._steps.chunk("prompt", start, min(chunk, sizes.prompt - start))]
                for start in range(0, sizes.prompt, chunk)
            ]
            times_s.append(sum(step.interval_s for step in self._steps.run_all(steps)))
            least_s = sum(map(self._least_s, steps))
            self._steps.end()
        return Row(
            name=f"prompt of {sizes.prompt:,} in chunks of {chunk:,}",
            value=sizes.prompt / min(times_s),
            unit="tokens/s",
            least=sizes.prompt / least_s,
            target=_PREFILL_TARGET,
        )

    def mixed(self, chunk: int) -> Row:
        """A step of decodes and of one chunk deep in a prompt."""
        steps = self._mixed_steps(chunk, self._sizes.decoded)
        timed = self._steps.run_all(steps)
        self._steps.end()
        return Row(
            name=self._mixed_name(chunk),
            value=1e3 * _median_s(timed),
            unit="ms",
            least=1e3 * self._least_s(steps[len(steps) // 2]),
            target=_MIXED_TARGET,
        )

    def kernels(self, chunk: int) -> str:
        """Return a table of the kernels of a step as `mixed` has, in Markdown."""
        *warm_up, step = self._mixed_steps(chunk, 3)
        self._steps.run_all(warm_up)
        with torch.profiler.profile() as profiler:
            self._steps.run(step)
        self._steps.end()
        is_gpu = self._runtime.model.device.type == "cuda"
        by, kind = ("self_device_time_total", "CUDA") if is_gpu else ("self_cpu_time_total", "CPU")
        spent = [event for event in profiler.key_averages() if event.device_type.name == kind]
        spent.sort(key=lambda event: -getattr(event, by))
        total, count = (sum(getattr(event, name) for event in spent) for name in (by, "count"))
        rows = [
            f"| `{event.key[:_NAME_CHARS]}` | {event.count} | {getattr(event, by) / 1e3:.2f} "
            f"| {100 * getattr(event, by) / total:.1f} |"
            for event in spent[:_MOST_KERNELS]
        ]
        head = [
            f"Kernels of {self._mixed_name(chunk)}, {count:,} in all:",
            "",
            "| kernel | launches | ms | % |",
            "|---|---|---|---|",
        ]
        return "\n".join([*head, *rows])

    def _mixed_name(self, chunk: int) -> str:
        sizes = self._sizes
        return f"{_streams(sizes.mixed_streams)} and {chunk:,} tokens at {sizes.mixed_start:,}"

    def _mixed_steps(self, chunk: int, count: int) -> list[list[ScheduledChunk]]:
        sizes, start = self._sizes, self._sizes.mixed_start
        decodes = self._decodes(sizes.mixed_streams, count, None)
        # It overwrites keys and values whose numbers do not matter.
        self._add("chunk", 0, known=start + chunk + 1, room=start + chunk)
        part = self._steps.chunk("chunk", start, chunk)
        return [[*rows, part] for rows in decodes]

    def _decodes(
        self, count: int, num_steps: int, params: SamplingParams | None
    ) -> list[list[ScheduledChunk]]:
        """Each step's tokens come of the step before it, so that the next may be under way."""
        context = self._sizes.context
        room = context + num_steps
        names = [f"stream {i}" for i in range(count)]
        for name, place in zip(names, self._places(room), strict=False):
            self._add(name, place, known=context, room=room, params=params)
        return [
            [self._steps.chunk(name, context - 1 + step, 1) for name in names]
            for step in range(num_steps)
        ]

    def _places(self, room: int) -> Iterator[int]:
        """Where streams lie in the cache, which they share where it is too small for all of them.

        What they read from there is as many bytes.
        """
        size = -(-room // self._runtime.kv.block_size) * self._runtime.kv.block_size
        return itertools.cycle(range(0, self.num_cache_tokens - size + 1, size))

    def _add(
        self,
        name: str,
        first_slot: int,
        *,
        known: int,
        room: int,
        params: SamplingParams | None = None,
    ) -> None:
        given = {} if params is None else {"params": params}
        self._steps.add(
            name, num_prompt_tokens=known, first_slot=first_slot, num_tokens=room, **given
        )

    def _least_s(self, chunks: Sequence[ScheduledChunk]) -> float:
        runtime, spec = self._runtime, self._runtime.spec
        assert isinstance(spec, DecoderSpec)
        operators = operators_of(
            spec,
            StepShape.of_chunks(chunks),
            token_bytes=runtime.cache.token_bytes,
            weight_bytes=runtime.model.num_weight_bytes,
        )
        return self._roofline.operators_s(operators)


def _streams(count: int) -> str:
    return f"{count} stream{'s' * (count > 1)}"


def _median_s(timed: Sequence[TimedStep]) -> float:
    return statistics.median(step.interval_s for step in timed[min(_WARM_UP, len(timed) // 2) :])
