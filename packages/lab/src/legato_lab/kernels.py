"""Compares a model's steps with the machine's roofline."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import torch

from legato.core.config import EngineConfig, Kernels
from legato.core.plan import ScheduledChunk
from legato.engine.assembly.builder import load_runtime
from legato.engine.assembly.runtime import ModelRuntime
from legato.model.spec import DecoderSpec
from legato.scheduler.step_shape import StepShape
from legato_lab.made_up_steps import MadeUpSteps
from legato_lab.work import MeasuredRates, Work, work_of

_REPEATS = 15

OnProgress = Callable[[str], None]


class _Sizes(NamedTuple):
    """The sizes to measure on a kind of device.

    Attributes:
        context: of the streams, in tokens.
        deep: position of the second of two chunks.
        read_bytes, matrix: of the roofline.
    """

    streams: tuple[int, ...]
    context: int
    prompt: int
    deep: int
    chunk: int
    read_bytes: int
    matrix: int


_SIZES = {
    "cpu": _Sizes((1, 8, 32, 64), 512, 4096, 6000, 512, 512 * 2**20, 2048),
    "cuda": _Sizes((1, 32, 128, 256), 1024, 8192, 6000, 2048, 4 * 2**30, 8192),
}


class MeasuredKernel(msgspec.Struct, frozen=True):
    """Attributes: seconds: the median of several steps, by the executor's own clock."""

    name: str
    work: Work
    seconds: float


def measure_roofline(device: torch.device) -> MeasuredRates:
    """Measure reading a large array, and multiplying large bfloat16 matrices.

    The numbers are random, since a GPU's clock depends on how many bits change.
    """
    sizes = _SIZES[device.type]
    values = torch.randn(sizes.read_bytes // 4, device=device)
    left, right = torch.randn(2, sizes.matrix, sizes.matrix, device=device).bfloat16()
    read_s = min(_seconds(values.sum, device) for _ in range(5))
    multiply_s = min(_seconds(lambda: left @ right, device) for _ in range(10))
    return MeasuredRates(sizes.read_bytes / read_s, 2 * sizes.matrix**3 / multiply_s)


def measure_kernels(
    config: EngineConfig, kernels: Kernels, on_progress: OnProgress
) -> tuple[list[MeasuredKernel], float]:
    """Measure decode steps of several numbers of streams, and prefill chunks, on made-up tokens.

    Returns:
        The steps, and the rate of attention in multiplications and additions a second, from the
        time that a chunk at a deep position takes beyond one at 0.
    """
    model = msgspec.structs.replace(config.model, kernels=kernels)
    runtime = load_runtime(msgspec.structs.replace(config, model=model))
    spec = runtime.checkpoint.decoder_spec
    sizes = _SIZES[runtime.model.device.type]
    steps = MadeUpSteps(runtime)
    on_progress(f"{kernels}: filling the cache")
    num_tokens = min(max(sizes.streams) * sizes.context, steps.num_cache_tokens)
    steps.fill(num_tokens, prompt=sizes.prompt, chunk=sizes.chunk)
    measured = []
    for name, chunks in _shapes(steps, sizes, runtime):
        on_progress(f"{kernels}: {name}")
        measured.append(_measured(steps, runtime, spec, name, chunks))
        steps.end()
    first, deep = measured[-2:]
    attention = (deep.work.num_flops - first.work.num_flops) / (deep.seconds - first.seconds)
    return measured, attention


def _shapes(
    steps: MadeUpSteps, sizes: _Sizes, runtime: ModelRuntime
) -> Iterator[tuple[str, list[ScheduledChunk]]]:
    context, chunk, max_num_seqs = sizes.context, sizes.chunk, runtime.config.scheduler.max_num_seqs
    assert max_num_seqs is not None
    for count in sizes.streams:
        if count > max_num_seqs or count * context > steps.num_cache_tokens:
            continue
        for i in range(count):
            steps.add(f"{i}", num_prompt_tokens=context, first_slot=i * context, num_tokens=context)
        rows = [steps.chunk(f"{i}", context - 1, 1) for i in range(count)]
        yield f"{count} streams at {context:,}", rows
    most = min(runtime.max_model_len, steps.num_cache_tokens)
    for start in (0, min(sizes.deep, most - chunk)):
        end = start + chunk
        steps.add("chunk", num_prompt_tokens=end, first_slot=0, num_tokens=end)
        yield f"{chunk} tokens at {start:,}", [steps.chunk("chunk", start, chunk)]


def _measured(
    steps: MadeUpSteps,
    runtime: ModelRuntime,
    spec: DecoderSpec,
    name: str,
    chunks: list[ScheduledChunk],
) -> MeasuredKernel:
    steps.run(chunks)
    times_s = sorted(steps.run(chunks).seconds for _ in range(_REPEATS))
    work = work_of(
        spec,
        StepShape.of_chunks(chunks),
        token_bytes=runtime.cache.token_bytes,
        weight_bytes=runtime.model.num_weight_bytes,
    )
    return MeasuredKernel(name, work, times_s[len(times_s) // 2])


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    started_s = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s
