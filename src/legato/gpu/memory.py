"""Measures the memory that steps take on a GPU, and the rest that the cache gets."""

import torch

from legato.gpu.device import Device
from legato.gpu.runner import GraphRunner
from legato.gpu.step_inputs import StepSize
from legato.gpu.step_program import StepProgram
from legato.gpu.warm_up import run_step


@torch.inference_mode()
def free_for_cache(
    program: StepProgram, runner: GraphRunner, device: Device, utilization: float
) -> int:
    """Return the bytes that remain for the cache in a share of the device's memory.

    The share also holds the memory in use now, by other processes too, without the cache of
    `program`; the temporary memory of the largest step; and the memory that graphs keep, which is
    the temporary memory of their largest step.

    Args:
        utilization: as in `CacheConfig.gpu_memory_utilization`.
    """
    run_step(program, device, program.largest)  # libraries allocate memory of their own first
    sizes = program.largest, runner.largest
    in_passing = [_taken_bytes(program, device, size) for size in sizes]
    device.forget_peak()
    memory = device.memory
    cache_bytes = sum(blocks.nbytes for blocks in program.blocks)
    in_use = memory.total - memory.free - cache_bytes
    return max(0, int(utilization * memory.total) - in_use - sum(in_passing))


def _taken_bytes(program: StepProgram, device: Device, size: StepSize) -> int:
    """Return the temporary memory of a step."""
    device.forget_peak()
    before = device.memory.peak
    run_step(program, device, size)
    return device.memory.peak - before
