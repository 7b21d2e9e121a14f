"""Products of rows with the experts that a router picked, all experts in one launch.

Rows are sorted by expert on the device. A program multiplies a tile of rows of one expert, so that
neither experts without rows nor padding are computed, and the host never knows how many rows an
expert has (grouped products, as in MegaBlocks; Gale et al., 2022, arXiv:2211.15841).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from legato.gpu.kernels.activation import activate, at_least, at_most
from legato.gpu.kernels.quantized import add_code_products, add_product, load_columns
from legato.model.mlp_spec import Activation
from legato.model.quantization import BLOCK

_FEWEST_ROWS, _MOST_ROWS = 16, 128
"""Rows of a tile."""
_TOGETHER = 8
"""Adjacent tiles of rows whose programs share the weights that they read."""
_SORTED = 1024
"""Pairs that a program looks at in one step while it sorts."""
_SUMMED = 1024
"""Numbers of a row that a program sums."""
_TILE_FIELDS = tl.constexpr(3)
_GROUP = tl.constexpr(BLOCK)


class ExpertWeights(NamedTuple):
    """The same projection of all experts.

    Attributes:
        values: [X, N, K] in the model's dtype; or codes, each expert's laid out as for
            `legato.gpu.kernels.quantized.multiply`.
        scales, minima: likewise, [X, N, K / 32]; None unless there are codes.
        bias: [X, N]; None if there is none.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None
    minima: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class SortedRows(NamedTuple):
    """A step's pairs of a row and one of its experts, by expert.

    Attributes:
        order: int32 [T * A], pairs `row * A + place`, in order of experts; the last ones are not
            written if there are rows that no expert computes.
        tiles: int32 [tiles, 3]: an expert, -1 for an unused tile; then the place in `order` of the
            tile's first pair, and the end of the expert's.
        tile_rows: most pairs of a tile.
        num_active: A, experts of a row.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    tile_rows: int
    num_active: int


def sort_by_expert(experts: torch.Tensor, slots: torch.Tensor, num_experts: int) -> SortedRows:
    """Sort rows by their experts; those of one expert stay in order.

    Args:
        experts: int64 [T, A], contiguous: of each row, the experts that compute it.
        slots: int32 [T]; rows with negative ones, which are padding, are left out.
    """
    num_pairs, num_active = experts.numel(), experts.shape[1]
    average = triton.next_power_of_2(triton.cdiv(num_pairs, num_experts))
    tile_rows = min(max(average, _FEWEST_ROWS), _MOST_ROWS)
    # Each expert with rows may have one tile that is not full.
    num_touched = min(num_pairs, num_experts)
    num_tiles = num_touched + (num_pairs - num_touched) // tile_rows
    num_tiles = triton.cdiv(num_tiles, _TOGETHER) * _TOGETHER
    counts = experts.new_empty(num_experts, dtype=torch.int32)
    order = experts.new_empty(num_pairs, dtype=torch.int32)
    tiles = experts.new_empty(num_tiles, _TILE_FIELDS.value, dtype=torch.int32)
    _count[(num_experts,)](experts, slots, counts, num_pairs, num_active, block=_SORTED)
    _sort[(num_experts,)](
        experts,
        slots,
        counts,
        order,
        tiles,
        num_pairs,
        num_active,
        num_experts,
        num_tiles,
        tile_rows=tile_rows,
        most_experts=triton.next_power_of_2(num_experts),
        most_tiles=triton.next_power_of_2(num_tiles),
        block=_SORTED,
    )
    return SortedRows(order, tiles, tile_rows, num_active)


def project_inner(
    rows: torch.Tensor,
    pairs: SortedRows,
    weights: ExpertWeights,
    out: torch.Tensor,
    *,
    activation: Activation,
    limit: float | None,
    slope: float,
) -> None:
    """Compute what each pair's expert has between its projections.

    It is `activation(gate) * up`, or as `MoeSpec.gate_limit` says; without gates, `activation(up)`.

    Args:
        rows: [T, K].
        weights: of gates, then of the other projections: N is 2I; I without gates.
        out: [T * A, I] in the dtype of `rows`, in the order of `pairs`; written.
        activation: silu, gelu_tanh or relu2.
        limit, slope: `MoeSpec.gate_limit` and `gate_slope`.
    """
    size, depth, num_outputs = out.shape[1], rows.shape[1], weights.values.shape[1]
    options = _options(rows, pairs, weights)
    _project_inner[(len(pairs.tiles) * triton.cdiv(num_outputs, options["tile_outputs"]),)](
        rows,
        pairs.order,
        pairs.tiles,
        *weights,
        out,
        size,
        depth,
        pairs.num_active,
        limit,
        slope,
        activation=activation,
        is_gated=num_outputs != size,
        **options,
    )


def project_weighted(
    inner: torch.Tensor,
    pairs: SortedRows,
    weights: ExpertWeights,
    factors: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute the output of each pair's expert, times the router's weight.

    Args:
        inner: [T * A, K], in the order of `pairs`.
        factors: float32 [T, A], contiguous: the router's weights.
        out: [T, A, N] in the dtype of `inner`; written, but for rows that no expert computes.
    """
    size, depth = out.shape[2], inner.shape[1]
    options = _options(inner, pairs, weights)
    _project_weighted[(len(pairs.tiles) * triton.cdiv(size, options["tile_outputs"]),)](
        inner, pairs.order, pairs.tiles, *weights, factors, out, size, depth, **options
    )


def sum_outputs(
    outputs: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Sum each row's outputs, the best expert's first.

    Args:
        outputs: [T, A, E], times the router's weights.
        shared: [T, E], the output of the MLP for all rows; None if there is none.
        gates: [T, 1], whose sigmoids are factors on `shared`; None for no factors.
        out: [T, E]; written.
    """
    num_rows, num_active, size = outputs.shape
    _sum_outputs[num_rows, triton.cdiv(size, _SUMMED)](
        outputs, shared, gates, out, size, num_active=num_active, block=_SUMMED
    )


def _options(rows: torch.Tensor, pairs: SortedRows, weights: ExpertWeights) -> dict[str, int]:
    """Return the compile options of a product."""
    is_large = pairs.tile_rows == _MOST_ROWS
    outputs, depth, num_stages = (128, 64, 3) if is_large else (64, 128, 3)
    if rows.dtype == torch.float32:  # tiles of operands have to fit into registers
        outputs, depth, num_stages = 32, 32, 2
    elif weights.scales is not None:
        outputs, depth, num_stages = (64, 128, 2) if is_large else (32, 128, 3)
    return {
        "bits": 8 * weights.values.shape[2] // rows.shape[1],
        "tile_rows": pairs.tile_rows,
        "tile_outputs": outputs,
        "tile_depth": depth,
        "together": _TOGETHER,
        "num_warps": 8 if is_large else 4,
        "num_stages": num_stages,
    }


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["slots"])
def _count(experts, slots, counts, num_pairs, num_active, block: tl.constexpr):
    """Count the pairs of one expert."""
    expert = tl.program_id(0)
    count = tl.zeros([block], tl.int32)
    for first in range(0, num_pairs, block):
        pair = first + tl.arange(0, block)
        count += _is_of(expert, pair, experts, slots, num_pairs, num_active)
    tl.store(counts + expert, tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"], do_not_specialize_on_alignment=["slots"])
def _sort(
    experts,
    slots,
    counts,
    order,
    tiles,
    num_pairs,
    num_active,
    num_experts,
    num_tiles,
    tile_rows: tl.constexpr,
    most_experts: tl.constexpr,
    most_tiles: tl.constexpr,
    block: tl.constexpr,
):
    """Write the pairs and the tiles of one expert, after those of all experts before it."""
    expert = tl.program_id(0)
    other = tl.arange(0, most_experts)
    before = tl.load(counts + other, mask=other < expert, other=0)
    first = tl.sum(before, axis=0)
    end = first + tl.load(counts + expert)
    first_tile = tl.sum(tl.cdiv(before, tile_rows), axis=0)
    end_tile = first_tile + tl.cdiv(end - first, tile_rows)
    tile = tl.arange(0, most_tiles)
    is_own = (tile >= first_tile) & (tile < end_tile)
    field = tiles + tile * _TILE_FIELDS
    tl.store(field, tl.zeros([most_tiles], tl.int32) + expert, mask=is_own)
    tl.store(field + 1, first + (tile - first_tile) * tile_rows, mask=is_own)
    tl.store(field + 2, tl.zeros([most_tiles], tl.int32) + end, mask=is_own)
    if expert == num_experts - 1:
        is_unused = (tile >= end_tile) & (tile < num_tiles)
        tl.store(field, tl.full([most_tiles], -1, tl.int32), mask=is_unused)
    for start in range(0, num_pairs, block):
        pair = start + tl.arange(0, block)
        is_of = _is_of(expert, pair, experts, slots, num_pairs, num_active)
        tl.store(order + first + tl.cumsum(is_of, axis=0) - 1, pair, mask=is_of > 0)
        first += tl.sum(is_of, axis=0)


@triton.jit
def _is_of(expert, pair, experts, slots, num_pairs, num_active):
    """Return 1 for the pairs of an expert, 0 for others and for those of padding: int32."""
    is_pair = pair < num_pairs
    found = tl.load(experts + pair, mask=is_pair, other=-1)
    slot = tl.load(slots + pair // num_active, mask=is_pair, other=-1)
    return ((found == expert) & (slot >= 0)).to(tl.int32)


@triton.jit
def _project_inner(
    rows,
    order,
    tiles,
    values,
    scales,
    minima,
    bias,
    out,
    size,
    depth,
    num_active,
    limit,
    slope,
    activation: tl.constexpr,
    is_gated: tl.constexpr,
    bits: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_depth: tl.constexpr,
    together: tl.constexpr,
):
    width: tl.constexpr = tile_outputs // 2 if is_gated else tile_outputs
    tile, part = _tile_and_part(tiles, tl.cdiv(size, width), together)
    expert = tl.load(tile)
    if expert < 0:
        return
    place = tl.load(tile + 1) + tl.arange(0, tile_rows)
    is_row = place < tl.load(tile + 2)
    row = tl.load(order + place, mask=is_row, other=0) // num_active
    column = tl.arange(0, tile_outputs)
    # Gates and ups alternate, so that a thread has both of a pair.
    output = part * width + (column // 2 + column % 2 * size if is_gated else column)
    sums = _multiply(
        rows, row, is_row, expert, output, values, scales, minima, bias,
        2 * size if is_gated else size, depth, bits, tile_depth,
    )  # fmt: skip
    if not is_gated:
        inner = activate(sums, activation)
    else:
        gate, up = tl.split(sums.reshape(tile_rows, width, 2))
        if limit is None:
            inner = activate(gate, activation) * up
        else:
            gate = at_most(gate, limit)
            up = at_most(at_least(up, -limit), limit)
            inner = (up + 1.0) * gate * tl.sigmoid(slope * gate)
    output = part * width + tl.arange(0, width)
    target = out + place.to(tl.int64)[:, None] * size + output[None, :]
    is_inside = is_row[:, None] & (output < size)[None, :]
    tl.store(target, inner.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _project_weighted(
    inner,
    order,
    tiles,
    values,
    scales,
    minima,
    bias,
    factors,
    out,
    size,
    depth,
    bits: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_depth: tl.constexpr,
    together: tl.constexpr,
):
    tile, part = _tile_and_part(tiles, tl.cdiv(size, tile_outputs), together)
    expert = tl.load(tile)
    if expert < 0:
        return
    place = tl.load(tile + 1) + tl.arange(0, tile_rows)
    is_row = place < tl.load(tile + 2)
    pair = tl.load(order + place, mask=is_row, other=0)
    output = part * tile_outputs + tl.arange(0, tile_outputs)
    sums = _multiply(
        inner, place, is_row, expert, output, values, scales, minima, bias, size, depth, bits,
        tile_depth,
    )  # fmt: skip
    sums *= tl.load(factors + pair, mask=is_row, other=0.0)[:, None]
    target = out + pair.to(tl.int64)[:, None] * size + output[None, :]
    is_inside = is_row[:, None] & (output < size)[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _tile_and_part(tiles, num_parts, together: tl.constexpr):
    """Return a program's tile and its part of the outputs.

    Programs of a few tiles and of one part follow each other: they read the same weights while
    these, and the tiles' rows, are in the cache of the GPU.
    """
    of_group = tl.program_id(0) % (together * num_parts)
    tile = tl.program_id(0) // (together * num_parts) * together + of_group % together
    return tiles + tile * _TILE_FIELDS, of_group // together


@triton.jit
def _multiply(
    rows,
    row,
    is_row,
    expert,
    output,
    values,
    scales,
    minima,
    bias,
    num_outputs,
    depth,
    bits: tl.constexpr,
    tile_depth: tl.constexpr,
):
    """Return some outputs of an expert for some rows, bias included: float32 [rows, outputs]."""
    first_output = expert.to(tl.int64) * num_outputs
    if scales is None:
        values += first_output * depth
    else:
        values += first_output * (depth * bits // 8)
        scales += first_output * (depth // _GROUP)
        if minima is not None:
            minima += first_output * (depth // _GROUP)
    is_output = output < num_outputs
    sums = tl.zeros([row.shape[0], output.shape[0]], tl.float32)
    for first in range(0, depth, tile_depth):
        if scales is None:
            column = first + tl.arange(0, tile_depth)
            weights = load_columns(values, output, is_output, column, depth)
            sums = add_product(sums, load_columns(rows, row, is_row, column, depth), weights)
        else:
            sums = add_code_products(
                sums, rows, row, is_row, values, scales, minima, output, num_outputs, first, depth,
                bits, tile_depth,
            )  # fmt: skip
    if bias is not None:
        added = tl.load(bias + first_output + output, mask=is_output, other=0.0)
        sums += added.to(tl.float32)[None, :]
    return sums


@triton.jit
def _sum_outputs(outputs, shared, gates, out, size, num_active: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = column < size
    total = tl.zeros([block], tl.float32)
    for place in tl.static_range(num_active):
        output = outputs + (row * num_active + place) * size + column
        total += tl.load(output, mask=is_inside, other=0.0).to(tl.float32)
    if shared is not None:
        added = tl.load(shared + row * size + column, mask=is_inside, other=0.0).to(tl.float32)
        if gates is not None:
            added *= tl.sigmoid(tl.load(gates + row).to(tl.float32))
        total += added
    tl.store(out + row * size + column, total.to(out.dtype.element_ty), mask=is_inside)
