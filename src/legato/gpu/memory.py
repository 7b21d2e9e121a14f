"""What steps take of a GPU's memory, and what they leave to the cache."""

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
    """Bytes that a share of the device's memory holds beside all else: those of the cache.

    All else is what is in use now, by others too, but for the cache that `program` has; what the
    largest step takes in passing; and what graphs keep, which is what their largest step takes.

    Args:
        utilization: as of `CacheConfig.gpu_memory_utilization`.
    """
    run_step(program, device, program.largest)  # libraries take their part before it is measured
    sizes = program.largest, runner.largest
    in_passing = [_taken_bytes(program, device, size) for size in sizes]
    device.forget_peak()
    memory = device.memory
    cache_bytes = program.blocks.numel() * program.blocks.element_size()
    in_use = memory.total - memory.free - cache_bytes
    return max(0, int(utilization * memory.total) - in_use - sum(in_passing))


def _taken_bytes(program: StepProgram, device: Device, size: StepSize) -> int:
    """By a step, beyond what it leaves behind."""
    device.forget_peak()
    before = device.memory.peak
    run_step(program, device, size)
    return device.memory.peak - before
