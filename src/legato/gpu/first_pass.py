"""The first forward pass on a GPU; see `legato.executor.first_pass`.

All ranks of a divided model call it, and get the same result.
"""

import torch

from legato.executor.first_pass import check_layers, first_plan
from legato.executor.sequences import Sequences
from legato.gpu.device import Device
from legato.gpu.step_loader import StepLoader
from legato.gpu.step_program import StepProgram


@torch.inference_mode()
def check_first_pass(program: StepProgram, device: Device, *, max_len: int) -> None:
    """Check that a first forward pass is finite; raises `UnsupportedModelError`.

    It computes a few tokens from all over the vocabulary.

    Args:
        max_len: positions of the model and of the cache.
    """
    model = program.model
    vocab_size, num_layers = model.spec.vocab_size, model.spec.num_layers
    plan = first_plan(
        vocab_size=vocab_size,
        max_len=max_len,
        block_size=program.block_size,
        num_groups=len(program.groups),
    )
    step, _ = StepLoader(program, device).load(Sequences().begin(plan), program)
    size = step.size
    rows = torch.arange(size.num_rows, dtype=torch.int32, device=device.torch_device)

    def values(num_layers: int | None) -> torch.Tensor:
        program.layers(*step, num_layers=num_layers)
        if num_layers is not None:
            return program.residual[: size.num_rows]
        logits = model.compute_logits(model.hidden_of(rows, program.residual))
        return model.of_rank_0(logits.abs().amax(dim=1))

    check_layers(values, num_layers, model.dtype)
