"""Every kernel, launched as models of real sizes launch it; see `compile_kernels`.

A launch makes its tensors without a device, which is then the meta device. Add one for each kernel,
and for each of its variants that differ in registers or shared memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from legato.gpu.kernels.attention import attend, make_scratch
from legato.gpu.kernels.rope import rope_table, rotate_and_write
from legato.gpu.work_items import Tiling, section_size, work_lists

_META = torch.device("meta")
_BLOCK_SIZE = 32


def _attend(
    num_heads: int, num_kv_heads: int, head_dim: int, sliding_window: int | None = None
) -> None:
    num_rows = 512
    query = torch.empty(num_rows, num_heads, head_dim, dtype=torch.bfloat16)
    cache = torch.empty(2, 64, num_kv_heads, _BLOCK_SIZE, head_dim, dtype=torch.bfloat16)
    shape = Tiling(num_heads, num_kv_heads, 132).shape(num_rows, has_chunks=True)
    attend(
        query,
        cache[0],
        cache[1],
        torch.empty(513, 256, dtype=torch.int32),
        work_lists(torch.empty(section_size(shape), dtype=torch.int32), shape),
        torch.empty_like(query),
        make_scratch(shape, num_heads=num_heads, head_dim=head_dim, device=_META),
        scale=head_dim**-0.5,
        sliding_window=sliding_window,
    )


def _rotate(num_heads: int, num_kv_heads: int, head_dim: int, *, has_norm: bool) -> None:
    num_rows = 512
    width = (num_heads + 2 * num_kv_heads) * head_dim
    cache = torch.empty(2, 64, num_kv_heads, _BLOCK_SIZE, head_dim, dtype=torch.bfloat16)
    norm = torch.empty(head_dim) if has_norm else None
    rotate_and_write(
        torch.empty(num_rows, width, dtype=torch.bfloat16),
        rope_table(torch.empty(num_rows, dtype=torch.int32), torch.empty(head_dim // 2), 1.0),
        torch.empty(num_rows, dtype=torch.int32),
        cache[0],
        cache[1],
        q_norm=norm,
        k_norm=norm,
        eps=1e-6,
    )


class Launch(NamedTuple):
    """What to call, and the compute capabilities to compile it for."""

    run: Callable[[], Any]
    capabilities: tuple[int, ...] = (80, 90)


LAUNCHES = {
    "attend, Llama 3.1 8B": Launch(partial(_attend, 32, 8, 128)),
    "attend, a window and heads of 96": Launch(partial(_attend, 32, 32, 96, 2047), (90,)),
    # On an Ampere, chunks of such heads spill 48 bytes.
    "attend, heads of 256": Launch(partial(_attend, 16, 8, 256), (90,)),
    "rotate, Llama 3.1 8B": Launch(partial(_rotate, 32, 8, 128, has_norm=False)),
    "rotate, Qwen3 8B": Launch(partial(_rotate, 32, 8, 128, has_norm=True)),
}
"""Key what is launched, for reports."""
