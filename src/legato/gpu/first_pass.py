"""The first forward pass on a GPU; see `legato.executor.first_pass`."""

import numpy as np
import torch

from legato.core.plan import StepPlan
from legato.executor.first_pass import check_layers, first_plan
from legato.executor.sequences import Sequences
from legato.gpu.sampler import SamplingTable
from legato.gpu.step_inputs import StepRows, StepSize
from legato.gpu.step_program import StepProgram
from legato.gpu.work_items import write_work


@torch.inference_mode()
def check_first_pass(program: StepProgram, *, max_len: int) -> None:
    """Compute a few tokens from all over the vocabulary; raises `UnsupportedModelError`.

    Args:
        max_len: positions that the model, and the cache, have.
    """
    spec = program.model.spec
    plan = first_plan(vocab_size=spec.vocab_size, max_len=max_len, block_size=program.block_size)
    size = _load(program, plan)

    def values(num_layers: int | None) -> torch.Tensor:
        program.layers(size, num_layers=num_layers)
        if num_layers is not None:
            return program.residual[: size.num_rows]
        program.head(size)
        return program.logits[: size.num_samples]

    check_layers(values, spec.num_layers, program.model.dtype)


def _load(program: StepProgram, plan: StepPlan) -> StepSize:
    """Have the inputs be those of a plan of one chunk."""
    step, (chunk,) = Sequences().begin(plan), plan.chunks
    blocks = np.array(chunk.block_ids, dtype=np.int32)
    rows = StepRows(step, [0], [blocks], block_size=program.block_size)
    size = program.size(chunk.num_tokens, chunk.num_samples, has_chunks=False)
    layout = program.layout(size)
    words = np.zeros(layout.num_words, dtype=np.int32)
    sections = layout.sections(words)
    rows.write(sections, SamplingTable(1), nobody=program.num_slots)
    write_work(sections[-1], layout.work_shape, rows.spans, sliding_window=None)
    program.block_table[0, : len(blocks)] = torch.from_numpy(blocks)
    program.words[: layout.num_words] = torch.from_numpy(words)
    return size
