"""Every kernel, launched as models of real sizes launch it; see `compile_kernels`.

A launch makes its tensors without a device, which is then the meta device. Add one for each kernel,
and for each of its variants that differ in registers or shared memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from legato.gpu.kernels.activation import apply_gates, gate_heads
from legato.gpu.kernels.attention import attend
from legato.gpu.kernels.attention_parts import make_scratch
from legato.gpu.kernels.embedding import embed
from legato.gpu.kernels.expert_choice import pick_experts
from legato.gpu.kernels.experts import (
    ExpertWeights,
    project_inner,
    project_weighted,
    sort_by_expert,
    sum_outputs,
)
from legato.gpu.kernels.mixing import mix_heads
from legato.gpu.kernels.norm import add_rms_norm, normalize
from legato.gpu.kernels.quantized import dequantize, multiply
from legato.gpu.kernels.rope import rope_table, rotate_and_write
from legato.gpu.linear import rounded
from legato.gpu.recurrence import mix
from legato.gpu.sampler import NUM_WORDS, SamplingInputs, sample
from legato.gpu.state_work import StateWorkShape
from legato.gpu.work_items import Tiling, has_wide_tiles, section_size, work_lists
from legato.model.decoder_layer import make_recurrence
from legato.model.mixer_spec import DeltaNetSpec, Mamba2Spec, RecurrenceSpec, ShortConvSpec
from legato.model.mlp_spec import Activation, MoeSpec
from legato.model.model import SCALE_BYTES
from legato.model.states import make_states
from tests.gpu.limits import Architecture
from tests.model.random_models import with_recurrence

_META = torch.device("meta")
_BLOCK_SIZE = 64


def _cache(
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_quantized: bool,
    block_size: int = _BLOCK_SIZE,
) -> torch.Tensor:
    """Keys and values of a layer."""
    dtype = torch.int8 if is_quantized else dtype
    numbers = head_dim + (SCALE_BYTES if is_quantized else 0)
    return torch.empty(2, 64, num_kv_heads, block_size, numbers, dtype=dtype)


def _attend(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sliding_window: int | None = None,
    *,
    is_quantized: bool = False,
    softcap: float | None = None,
    has_sinks: bool = False,
    block_size: int = _BLOCK_SIZE,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    num_rows = 512
    query = torch.empty(num_rows, num_heads, head_dim, dtype=dtype)
    cache = _cache(num_kv_heads, head_dim, dtype, is_quantized=is_quantized, block_size=block_size)
    has_wide = has_wide_tiles(dtype, head_dim)
    tiling = Tiling(num_heads, num_kv_heads, 132, has_wide=has_wide)
    shape = tiling.shape(num_rows, has_chunks=True)
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
        softcap=softcap,
        sinks=torch.empty(num_heads) if has_sinks else None,
    )


def _rotate(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    has_norm: bool = False,
    is_quantized: bool = False,
) -> None:
    num_rows = 512
    width = (num_heads + 2 * num_kv_heads) * head_dim
    cache = _cache(num_kv_heads, head_dim, is_quantized=is_quantized)
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


def _mix_heads(num_heads: int, head_dim: int) -> None:
    mix_heads(torch.empty(512, num_heads, head_dim, dtype=torch.bfloat16))


def _sample(dtype: torch.dtype) -> None:
    num_rows, vocab_size = 256, 128_256
    logits = torch.empty(num_rows, vocab_size, dtype=dtype)
    words = torch.empty(NUM_WORDS * num_rows, dtype=torch.int32)
    sample(logits, SamplingInputs.of(words), *torch.empty(3, num_rows, dtype=torch.int32))


def _norm(size: int) -> None:
    residual, out = torch.empty(512, size), torch.empty(512, size, dtype=torch.bfloat16)
    add_rms_norm(residual, torch.empty_like(out), torch.empty(size), 1e-6, out)
    rows = torch.empty(512, dtype=torch.int32)
    add_rms_norm(residual, None, torch.empty(size), 1e-6, out, rows=rows)
    normalize(out[:, : size // 2], torch.empty(size // 2), 1e-6)


def _apply_gates() -> None:
    gate_up = torch.empty(512, 2 * 14_336, dtype=torch.bfloat16)
    apply_gates(gate_up, gate_up.new_empty(512, 14_336), "silu")
    apply_gates(gate_up, gate_up.new_empty(512, 14_336), "gelu_tanh")


def _embed() -> None:
    table = torch.empty(128_256, 4096, dtype=torch.bfloat16)
    embed(*torch.empty(2, 512, dtype=torch.int32), table, torch.empty(512, 4096))


def _codes(bits: int, num_rows: int, *, is_float: bool = False) -> None:
    codes = torch.empty(4096, 14_336 * bits // 8, dtype=torch.int8 if is_float else torch.uint8)
    scales = torch.empty(4096, 14_336 // 32, dtype=torch.float32 if is_float else torch.float16)
    minima = None if is_float else scales
    rows = torch.empty(num_rows, 14_336, dtype=torch.bfloat16)
    multiply(rows, codes, scales, minima, None, rows.new_empty(num_rows, 4096))
    dequantize(codes, scales, minima, rows.new_empty(4096, 14_336))


def _round() -> None:
    rounded(torch.empty(512, 14_336, dtype=torch.bfloat16))
    rounded(torch.empty(512, 2 * 14_336, dtype=torch.bfloat16), "silu")


def _gate_heads() -> None:
    projected = torch.empty(512, 3 * 4096, dtype=torch.bfloat16)
    gate_heads(projected[:, -4096:], projected.new_empty(512, 4096))


def _mix(own: RecurrenceSpec, hidden_size: int) -> None:
    """Runs of several rows, and then of one row each."""
    dtype = torch.bfloat16
    spec = with_recurrence(own, hidden_size=hidden_size)
    mixer = make_recurrence(spec, 1, partial(torch.empty, dtype=dtype))
    [states] = make_states([own.state], 64, dtype, _META)
    for has_chunks in (True, False):
        shape = StateWorkShape.of(512, 512, has_chunks=has_chunks)
        work = shape.views(torch.empty(sum(shape.sizes), dtype=torch.int32))
        mix(mixer, torch.empty(512, len(mixer.in_proj.weight), dtype=dtype), work, states)


def _experts(
    num_rows: int,
    *,
    bits: int | None = None,
    is_limited: bool = False,
    activation: Activation = "silu",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Those of Qwen3-30B-A3B; or of gpt-oss-20b, whose gates have limits and biases.

    With the activation of Nemotron 3, they have no gates.
    """
    num_experts, num_active, hidden_size, size = (
        (32, 4, 2880, 2880) if is_limited else (128, 8, 2048, 768)
    )

    def weights_of(num_outputs: int, depth: int) -> ExpertWeights:
        whole = num_experts, num_outputs, depth
        bias = torch.empty(num_experts, num_outputs, dtype=dtype) if is_limited else None
        if bits is None:
            return ExpertWeights(torch.empty(whole, dtype=dtype), bias=bias)
        codes = torch.empty(num_experts, num_outputs, depth * bits // 8, dtype=torch.uint8)
        scales = torch.empty(num_experts, num_outputs, depth // 32, dtype=torch.float16)
        return ExpertWeights(codes, scales, scales, bias)

    picked = torch.empty(num_rows, num_active, dtype=torch.int64)
    pairs = sort_by_expert(picked, torch.empty(num_rows, dtype=torch.int32), num_experts)
    rows = torch.empty(num_rows, hidden_size, dtype=dtype)
    inner = rows.new_empty(picked.numel(), size)
    gate_up = weights_of(size if activation == "relu2" else 2 * size, hidden_size)
    limit = 7.0 if is_limited else None
    project_inner(rows, pairs, gate_up, inner, activation=activation, limit=limit, slope=1.702)
    outputs = rows.new_empty(num_rows, num_active, hidden_size)
    down = weights_of(hidden_size, size)
    project_weighted(inner, pairs, down, torch.empty(num_rows, num_active), outputs)
    gates = None if is_limited else rows.new_empty(num_rows, 1)
    sum_outputs(outputs, None if is_limited else rows, gates, torch.empty_like(rows))


def _pick(**moe: Any) -> None:
    spec = MoeSpec(size=64, **moe)
    numbers = torch.empty(spec.num_experts)
    experts = torch.empty(512, spec.num_active, dtype=torch.int64)
    pick_experts(
        torch.empty(512, spec.num_experts),
        spec,
        numbers if spec.has_router_bias else None,
        numbers if spec.has_selection_bias else None,
        numbers if spec.has_expert_scale else None,
        torch.empty(512, dtype=torch.int32),
        experts,
        torch.empty_like(experts, dtype=torch.float32),
    )


class Launch(NamedTuple):
    """What to call, and what to compile it for, most wanted first."""

    run: Callable[[], Any]
    architectures: tuple[Architecture, ...] = (80, 90)


LAUNCHES = {
    # Both kinds of items use the Hopper's own tensor cores.
    "attend, Llama 3.1 8B": Launch(partial(_attend, 32, 8, 128), (90, 80)),
    "attend, blocks of 32": Launch(partial(_attend, 32, 8, 128, block_size=32), (90,)),
    "attend, a window and heads of 96": Launch(partial(_attend, 32, 32, 96, 2047), (90,)),
    # On an Ampere, chunks of such heads spill 48 bytes.
    "attend, heads of 256": Launch(partial(_attend, 16, 8, 256), (90,)),
    "attend, heads of 512": Launch(partial(_attend, 8, 1, 512)),
    "attend, an 8-bit cache": Launch(partial(_attend, 32, 8, 128, is_quantized=True)),
    "attend, float32": Launch(partial(_attend, 32, 8, 128, dtype=torch.float32), (90,)),
    "attend, a cap and a window": Launch(partial(_attend, 16, 8, 128, 4095, softcap=50.0), (90,)),
    "attend, sinks and a window": Launch(partial(_attend, 64, 8, 64, 128, has_sinks=True), (90,)),
    "rotate, Llama 3.1 8B": Launch(partial(_rotate, 32, 8, 128)),
    "rotate, an 8-bit cache": Launch(partial(_rotate, 32, 8, 128, is_quantized=True), (90,)),
    "rotate, an 8-bit cache and heads of 96": Launch(
        partial(_rotate, 32, 32, 96, is_quantized=True), (90,)
    ),
    "mix heads of 128": Launch(partial(_mix_heads, 32, 128), (90,)),
    "mix heads of 96": Launch(partial(_mix_heads, 32, 96), (90,)),
    "rotate, Qwen3 8B": Launch(partial(_rotate, 32, 8, 128, has_norm=True), (90,)),
    "sample": Launch(partial(_sample, torch.bfloat16), (90,)),
    "sample adjusted logits": Launch(partial(_sample, torch.float32), (90,)),
    "norm of 4,096": Launch(partial(_norm, 4096), (90,)),
    "norm of 16,384": Launch(partial(_norm, 16_384), (90,)),
    "gate": Launch(_apply_gates, (90,)),
    "embed": Launch(_embed, (90,)),
    "4 bits, 128 rows": Launch(partial(_codes, 4, 128)),
    "8 bits, 128 rows": Launch(partial(_codes, 8, 128), (90,)),
    "4 bits, 64 rows": Launch(partial(_codes, 4, 64)),
    "4 bits, 1 row": Launch(partial(_codes, 4, 1)),
    "8 bits, 64 rows": Launch(partial(_codes, 8, 64)),
    "8 bits, 1 row": Launch(partial(_codes, 8, 1), (90,)),
    "8-bit floats, 64 rows": Launch(partial(_codes, 8, 64, is_float=True)),
    "gate of heads": Launch(_gate_heads, (90,)),
    "mix, LFM2": Launch(
        partial(_mix, ShortConvSpec(num_channels=2048, kernel_size=3), 2048), (90,)
    ),
    "mix, Qwen3.5 4B": Launch(
        partial(
            _mix, DeltaNetSpec(num_heads=32, num_key_heads=16, key_dim=128, value_dim=128), 2560
        )
    ),
    "mix, Granite 4 H": Launch(
        partial(_mix, Mamba2Spec(num_heads=64, num_groups=1, head_dim=64, state_size=128), 2048),
        (90,),
    ),
    # The larger states on the GPU with less shared memory.
    "mix, Falcon-H1": Launch(
        partial(_mix, Mamba2Spec(num_heads=32, num_groups=1, head_dim=64, state_size=256), 2048),
        (80,),
    ),
    "pick, Qwen3-30B-A3B": Launch(partial(_pick, num_experts=128, num_active=8)),
    "pick, Qwen3-Next": Launch(partial(_pick, num_experts=512, num_active=10)),
    "pick, gpt-oss-20b": Launch(
        partial(
            _pick,
            num_experts=32,
            num_active=4,
            score="softmax_of_active",
            has_router_bias=True,
        )
    ),
    "pick, DeepSeek-V3": Launch(
        partial(
            _pick,
            num_experts=256,
            num_active=8,
            score="sigmoid",
            has_selection_bias=True,
            num_groups=8,
            num_active_groups=4,
            factor=2.5,
        )
    ),
    "experts, 1 row": Launch(partial(_experts, 1)),
    "experts, 512 rows": Launch(partial(_experts, 512), (90,)),
    "experts, 2,048 rows": Launch(partial(_experts, 2048)),
    "experts, limits, 1 row": Launch(partial(_experts, 1, is_limited=True), (90,)),
    "experts, limits, 2,048 rows": Launch(partial(_experts, 2048, is_limited=True), (90,)),
    "experts, 4 bits, 1 row": Launch(partial(_experts, 1, bits=4)),
    "experts, 4 bits, 2,048 rows": Launch(partial(_experts, 2048, bits=4)),
    "experts, 8 bits, 1 row": Launch(partial(_experts, 1, bits=8), (90,)),
    "experts, 8 bits, 2,048 rows": Launch(partial(_experts, 2048, bits=8)),
    "experts, no gates": Launch(partial(_experts, 2048, activation="relu2"), (90,)),
    "experts, gelu, 4 bits": Launch(partial(_experts, 1, bits=4, activation="gelu_tanh"), (90,)),
    "experts, float32": Launch(partial(_experts, 2048, dtype=torch.float32), (90,)),
    # An Ampere has no such floats.
    "round to 8-bit floats": Launch(_round, (90,)),
}
"""Key what is launched, for reports."""
