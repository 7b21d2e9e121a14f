"""Runs steps at start-up, so that the first requests do not wait for compilation."""

from collections.abc import Sequence

import torch

from legato.core.sampling_params import MAX_LOGPROBS
from legato.gpu.device import Device
from legato.gpu.runner import GraphRunner
from legato.gpu.step_inputs import StepSize
from legato.gpu.step_program import StepProgram
from legato.model.spec import LayerSpec


@torch.inference_mode()
def warm_up(program: StepProgram, runner: GraphRunner, device: Device) -> None:
    """Compile kernels, load libraries and capture graphs."""
    run_step(program, device, program.largest)
    for size in runner.larger():  # libraries choose a kernel for each size that they meet
        program.layers(size, num_layers=_num_kinds(program.model.spec.layers))
    runner.capture()
    device.synchronize()
    # The steps had no requests, so their results may be NaN.
    written = [blocks[:, :, 0] for blocks in program.blocks]
    for values in (program.words, program.last_token, program.sampled, *written):
        values.zero_()


def _num_kinds(layers: Sequence[LayerSpec]) -> int:
    """Return how many of the first layers are of all kinds."""
    return 1 + max(layers.index(kind) for kind in layers)


def run_step(program: StepProgram, device: Device, size: StepSize) -> None:
    """Compute a step without requests, in the first blocks of a cache that is not in use yet.

    Its logits are adjusted and all its tokens scored, since that takes the most memory.
    """
    program.words.zero_()
    program.layers(size)
    program.head(size)
    program.sample(size, adjusted=program.adjusted(size.num_samples, []))
    program.scores(torch.arange(size.num_samples, device=device.torch_device), MAX_LOGPROBS)
    device.synchronize()
