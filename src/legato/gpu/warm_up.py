"""Runs steps at start-up, so that the first requests do not wait for compilation."""

import torch

from legato.core.sampling_params import MAX_LOGPROBS
from legato.gpu.device import Device
from legato.gpu.runner import GraphRunner
from legato.gpu.step_inputs import StepSize
from legato.gpu.step_program import StepProgram


@torch.inference_mode()
def warm_up(program: StepProgram, runner: GraphRunner, device: Device) -> None:
    """Compile kernels, load libraries and capture graphs."""
    run_step(program, device, program.largest)
    runner.capture()
    device.synchronize()
    # The steps had no requests, so their results may be NaN.
    written = [blocks[:, :, 0] for blocks in program.blocks]
    for values in (program.words, program.last_token, program.sampled, *written):
        values.zero_()


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
