"""Steps before the first, so that the first ones wait for nothing but themselves."""

import torch

from legato.gpu.device import Device
from legato.gpu.runner import GraphRunner
from legato.gpu.sampler import adjust
from legato.gpu.step_inputs import StepSize
from legato.gpu.step_program import StepProgram


@torch.inference_mode()
def warm_up(program: StepProgram, runner: GraphRunner, device: Device) -> None:
    """Have kernels compiled, libraries loaded, and graphs captured."""
    run_step(program, device, program.largest)
    runner.capture()
    device.synchronize()
    # The steps had no requests, and what they computed in their place may be no numbers.
    written = program.blocks[:, :, 0]
    for values in (program.words, program.last_token, program.sampled, written):
        values.zero_()


def run_step(program: StepProgram, device: Device, size: StepSize) -> None:
    """Compute a step of no requests, in the first block of a cache that nobody uses yet.

    Logits are changed as some requests ask, which takes the most.
    """
    program.words.zero_()
    program.forward(size)
    program.sample(size, adjusted=adjust(program.logits[: size.num_samples], []))
    device.synchronize()
