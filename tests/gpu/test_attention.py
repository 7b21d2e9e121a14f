"""Attention of packed rows against float64, in caches whose other blocks are NaN."""

import torch

from legato.gpu.kernels.attention import attend, make_scratch
from legato.gpu.work_items import Tiling, section_size, work_lists, write_work
from tests.gpu.numbers import assert_near, each_dtype
from tests.gpu.paged import PagedStep, numpy_section

MIXED = [(1, 299), (1, 0), (1, 64), (3, 130), (40, 0), (21, 150), (1, 63)]
"""Decodes of one part and of several, drafts, a prompt, and a chunk behind others."""


def _attend(
    step: PagedStep,
    *,
    num_processors: int = 6,
    has_chunks: bool = True,
    sliding_window: int | None = None,
    widest: int | None = None,
) -> torch.Tensor:
    """Attention of a step by the kernels: [P, H, D], padding as it was."""
    num_rows, num_heads, head_dim = step.query.shape
    device, num_kv_heads = step.query.device, step.key_cache.shape[1]
    shape = Tiling(num_heads, num_kv_heads, num_processors).shape(num_rows, has_chunks=has_chunks)
    section = numpy_section(section_size(shape))
    write_work(section, shape, step.spans, widest or sliding_window)
    return attend(
        step.query,
        step.key_cache,
        step.value_cache,
        step.block_table,
        work_lists(torch.from_numpy(section).to(device), shape),
        torch.full_like(step.query, -7),
        make_scratch(shape, num_heads=num_heads, head_dim=head_dim, device=device),
        scale=head_dim**-0.5,
        sliding_window=sliding_window,
    )


def _check(step: PagedStep, sliding_window: int | None = None, **how: int | None) -> None:
    out = _attend(step, sliding_window=sliding_window, **how)
    expected = step.expected(step.query.shape[2] ** -0.5, sliding_window)
    assert_near(out[: len(expected)], expected, step.query.dtype)
    assert (out[len(expected) :] == -7).all()


@each_dtype
def test_a_mixed_step(dtype: torch.dtype, device: torch.device) -> None:
    _check(
        PagedStep.random(
            MIXED,
            heads=(4, 2),
            head_dim=32,
            block_size=16,
            num_padding=5,
            dtype=dtype,
            device=device,
        )
    )
