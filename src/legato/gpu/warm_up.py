"""Steps before the first: what they take, and having done what the first ones would wait for.

They compute with whatever is in memory, in the first block of a cache that nobody uses yet.
"""

import torch

from legato.gpu.device import Device
from legato.gpu.runner import GraphRunner
from legato.gpu.sampler import adjust
from legato.gpu.step_inputs import StepSize
from legato.gpu.step_program import StepProgram


@torch.inference_mode()
def warm_up(program: StepProgram, runner: GraphRunner, device: Device) -> None:
    """Have kernels compiled, libraries loaded, and graphs captured."""
    _run(program, device, largest_step(program))
    runner.capture()
    device.synchronize()
    # The steps had no requests, and what they computed in their place may be no numbers.
    written = program.blocks[:, :, 0]
    for values in (program.words, program.last_token, program.sampled, written):
        values.zero_()


@torch.inference_mode()
def free_for_cache(
    program: StepProgram, runner: GraphRunner, device: Device, utilization: float
) -> int:
    """Bytes that a share of the device's memory holds beside all else: those of the cache.

    All else is what is in use now, by others too, but for the cache that `program` has; what the
    largest step takes in passing; and what graphs keep, which is what their largest step takes.

    Args:
        utilization: as of `CacheConfig.gpu_memory_utilization`.
    """
    sizes = largest_step(program), runner.largest
    _run(program, device, sizes[0])  # libraries take their part before it is measured
    in_passing = [_taken_bytes(program, device, size) for size in sizes]
    device.forget_peak()
    memory = device.memory
    cache_bytes = program.blocks.numel() * program.blocks.element_size()
    in_use = memory.total - memory.free - cache_bytes
    return max(0, int(utilization * memory.total) - in_use - sum(in_passing))


def largest_step(program: StepProgram) -> StepSize:
    return StepSize(program.max_rows, program.max_samples, has_chunks=True)


def _taken_bytes(program: StepProgram, device: Device, size: StepSize) -> int:
    """By a step, beyond what it leaves behind."""
    device.forget_peak()
    before = device.memory.peak
    _run(program, device, size)
    return device.memory.peak - before


def _run(program: StepProgram, device: Device, size: StepSize) -> None:
    """With requests that change logits, which takes the most."""
    program.words.zero_()
    program.forward(size)
    program.sample(size, adjusted=adjust(program.logits[: size.num_samples], []))
    device.synchronize()
