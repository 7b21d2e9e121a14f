"""Products with quantized weights, dequantization, and rounding of rows to 8-bit floats."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from legato.gpu.kernels.activation import activate
from legato.gpu.kernels.norm import num_warps
from legato.model.mlp_spec import Activation
from legato.model.quantization import BLOCK

_FEWEST_ROWS, _MOST_ROWS = 16, 128
"""Rows of a tile; all of them share the decoding of a tile of codes."""
_NUM_OUTPUTS, _DEPTH = 32, 128
"""Size of a tile of codes that are dequantized; the depth is that of products, too."""


class _Tiling(NamedTuple):
    """How a product is cut.

    A row of codes is cut into parts until there are `num_programs`, which keep a large GPU busy, or
    a part has `fewest_products` of tiles: fewer would not be worth the time that summing parts
    takes. Neither number depends on the GPU, so that sums are rounded alike on all of them.
    """

    num_outputs: int
    num_programs: int
    fewest_products: int
    num_warps: int
    num_stages: int

    def parts(self, num_tiles: int, depth: int) -> tuple[int, int]:
        """Return how many parts a row of codes is cut into, and the codes of each."""
        count = min(self.num_programs // num_tiles, depth // (self.fewest_products * _DEPTH))
        part_depth = triton.cdiv(triton.cdiv(depth, max(1, count)), _DEPTH) * _DEPTH
        return triton.cdiv(depth, part_depth), part_depth


_WEIGHTS_FIRST = {
    16: _Tiling(64, 1056, 4, 4, 3),
    **dict.fromkeys((32, 64), _Tiling(128, 264, 8, 8, 3)),
}
"""Of 4 bits, by the rows of a tile: as it was fastest on an H200."""
_ROWS_FIRST = {
    16: _Tiling(32, 512, 8, 4, 3),
    **dict.fromkeys((32, 64), _Tiling(64, 512, 8, 4, 3)),
    128: _Tiling(64, 512, 8, 8, 2),
}
"""Of tiles with 128 rows, and of 8 bits. With 3 stages, an Ampere has too few registers for 128."""
_SUMMED = 512
"""Outputs of a program that sums parts."""
_GROUP = tl.constexpr(BLOCK)
_LARGEST_FP8 = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)


def multiply(
    rows: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Multiply rows by the transpose of a matrix [N, K] of `scale * code + minimum`.

    Args:
        rows: [T, K].
        codes: uint8 [N, K], or [N, K / 2] of 4 bits each: of 32 adjacent codes, the first 16 are
            the lower halves of 16 bytes, the others the upper halves. int8 [N, K] are the bits of
            8-bit floats, e4m3fn.
        scales: float16 or float32 [N, K / 32].
        minima: likewise; None if there are none.
        bias: [N].
        out: [T, N], in the dtype of `rows`; written.
    """
    (num_rows, depth), num_outputs = rows.shape, len(codes)
    bits = 8 * codes.shape[1] // depth
    tile_rows = min(max(triton.next_power_of_2(num_rows), _FEWEST_ROWS), _MOST_ROWS)
    has_weights_first = bits == 4 and tile_rows in _WEIGHTS_FIRST
    tiling = (_WEIGHTS_FIRST if has_weights_first else _ROWS_FIRST)[tile_rows]
    tiles = triton.cdiv(num_rows, tile_rows), triton.cdiv(num_outputs, tiling.num_outputs)
    num_parts, part_depth = tiling.parts(tiles[0] * tiles[1], depth)
    parts = out
    if num_parts > 1:
        parts = out.new_empty(num_parts, *out.shape, dtype=torch.float32)
    (_multiply_weights if has_weights_first else _multiply_rows)[(*tiles, num_parts)](
        rows,
        codes,
        scales,
        minima,
        bias if num_parts == 1 else None,
        parts,
        num_rows,
        num_outputs,
        depth,
        part_depth,
        bits=bits,
        tile_rows=tile_rows,
        tile_outputs=tiling.num_outputs,
        tile_depth=_DEPTH,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if num_parts > 1:
        _sum_parts[num_rows, triton.cdiv(num_outputs, _SUMMED)](
            parts, bias, out, num_rows, num_outputs, num_parts=num_parts, block=_SUMMED
        )


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write the weights of codes that are laid out as for `multiply`.

    Args:
        out: [N, K].
    """
    num_outputs, depth = out.shape
    _dequantize[triton.cdiv(num_outputs, _NUM_OUTPUTS), triton.cdiv(depth, _DEPTH)](
        codes,
        scales,
        minima,
        out,
        num_outputs,
        depth,
        bits=8 * codes.shape[1] // depth,
        tile_outputs=_NUM_OUTPUTS,
        tile_depth=_DEPTH,
    )


def round_rows(rows: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Round each row to 8-bit floats, scaled so that its largest number becomes the largest float.

    Args:
        rows: [T, K].
        out: float8_e4m3fn [T, K]; written.
        scales: float32 [T, 1], factors from a row's floats to its numbers; written.
    """
    _round(rows, out, scales, None)


def round_gated_rows(
    gate_up: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, activation: Activation
) -> None:
    """Apply gates to rows, then round as `round_rows` does, without storing them in between.

    Args:
        gate_up, activation: as for `apply_gates`.
        out, scales: as for `round_rows`.
    """
    _round(gate_up, out, scales, activation)


def _round(
    rows: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, activation: Activation | None
) -> None:
    num_rows, size = out.shape
    _round_rows[(num_rows,)](
        rows,
        out,
        scales,
        size,
        activation=activation,
        block=triton.next_power_of_2(size),
        num_warps=num_warps(size),
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=("num_rows",))
def _sum_parts(
    parts, bias, out, num_rows, num_outputs, num_parts: tl.constexpr, block: tl.constexpr
):
    """Sum [num_parts, T, N] in order."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * block + tl.arange(0, block)
    is_output = output < num_outputs
    sums = tl.zeros([block], tl.float32)
    for part in tl.static_range(num_parts):
        place = (part * num_rows + row) * num_outputs + output
        sums += tl.load(parts + place, mask=is_output, other=0.0)
    if bias is not None:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + output, sums.to(out.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=("num_rows",))
def _multiply_rows(
    rows,
    codes,
    scales,
    minima,
    bias,
    out,
    num_rows,
    num_outputs,
    depth,
    part_depth,
    bits: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_depth: tl.constexpr,
):
    """Multiply a tile of rows by weights, which are written to shared memory."""
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    is_row = row < num_rows
    sums = tl.zeros([tile_rows, tile_outputs], tl.float32)
    begin = tl.program_id(2) * part_depth
    for first in range(begin, tl.minimum(begin + part_depth, depth), tile_depth):
        sums = add_code_products(
            sums, rows, row, is_row, codes, scales, minima, output, num_outputs, first, depth, bits,
            tile_depth,
        )  # fmt: skip
    _store(sums, bias, out, row, num_rows, output, num_outputs)


@triton.jit(do_not_specialize=("num_rows",))
def _multiply_weights(
    rows,
    codes,
    scales,
    minima,
    bias,
    out,
    num_rows,
    num_outputs,
    depth,
    part_depth,
    bits: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_depth: tl.constexpr,
):
    """Multiply a tile of weights, of 4 bits, by rows.

    A Hopper's tensor cores take the left operand from registers, where weights are made. Scales
    are loaded one product ahead, for Triton loads only tiles of at least 4 bytes in the background.
    """
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    is_row = row < num_rows
    sums = tl.zeros([tile_outputs, tile_rows], tl.float32)
    begin = tl.program_id(2) * part_depth
    next_scale, next_minimum = _load_scales(
        scales, minima, output, num_outputs, begin, depth, tile_depth
    )
    for first in range(begin, tl.minimum(begin + part_depth, depth), tile_depth):
        column, code = _load_codes(codes, output, num_outputs, first, depth, bits, tile_depth)
        scale = _repeated(next_scale, code.shape[1])
        minimum = _repeated(next_minimum, code.shape[1])
        next_scale, next_minimum = _load_scales(
            scales, minima, output, num_outputs, first + tile_depth, depth, tile_depth
        )
        code = code.to(tl.int32)
        for half in tl.static_range(1, -1, -1):  # in the other order, it takes more registers
            values = load_columns(rows, row, is_row, column + half * (_GROUP // 2), depth)
            weights = _widened(code >> 4 if half else code & 15) * scale + minimum
            sums = add_product(sums, weights.to(values.dtype), values)
    _store(tl.trans(sums), bias, out, row, num_rows, output, num_outputs)


@triton.jit
def _store(sums, bias, out, row, num_rows, output, num_outputs):
    """Store sums [rows, outputs] of the part that this program has."""
    is_output = output < num_outputs
    if bias is not None:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    out_row = tl.program_id(2).to(tl.int64) * num_rows + row
    place = out + out_row[:, None] * num_outputs + output[None, :]
    is_inside = (row < num_rows)[:, None] & is_output[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def add_code_products(
    sums,
    rows,
    row,
    is_row,
    codes,
    scales,
    minima,
    output,
    num_outputs,
    first,
    depth,
    bits: tl.constexpr,
    tile_depth: tl.constexpr,
):
    """Add products with the weights of `tile_depth` columns, from `first` on."""
    column, code = _load_codes(codes, output, num_outputs, first, depth, bits, tile_depth)
    scale, minimum = _load_scales(scales, minima, output, num_outputs, first, depth, tile_depth)
    scale, minimum = _repeated(scale, code.shape[1]), _repeated(minimum, code.shape[1])
    if bits == 4:
        values = load_columns(rows, row, is_row, column + _GROUP // 2, depth)
        sums = add_product(sums, values, (code >> 4) * scale + minimum)
        code = code & 15
    values = load_columns(rows, row, is_row, column, depth)
    return add_product(sums, values, _numbers(code) * scale + minimum)


@triton.jit
def _dequantize(
    codes,
    scales,
    minima,
    out,
    num_outputs,
    depth,
    bits: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_depth: tl.constexpr,
):
    output = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    first = tl.program_id(1) * tile_depth
    column, code = _load_codes(codes, output, num_outputs, first, depth, bits, tile_depth)
    scale, minimum = _load_scales(scales, minima, output, num_outputs, first, depth, tile_depth)
    scale, minimum = _repeated(scale, code.shape[1]), _repeated(minimum, code.shape[1])
    place = out + output.to(tl.int64)[:, None] * depth + column[None, :]
    is_inside = (output < num_outputs)[:, None] & (column < depth)[None, :]
    if bits == 4:
        high = (code >> 4) * scale + minimum
        tl.store(place + _GROUP // 2, high.to(out.dtype.element_ty), mask=is_inside)
        code = code & 15
    low = _numbers(code) * scale + minimum
    tl.store(place, low.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _load_codes(
    codes, output, num_outputs, first, depth, bits: tl.constexpr, tile_depth: tl.constexpr
):
    """Return each byte's column (4 bits: its lower half's), and the bytes of tile_depth columns."""
    byte = tl.arange(0, tile_depth * bits // 8)
    column = first + byte
    if bits == 4:
        column = first + byte // (_GROUP // 2) * _GROUP + byte % (_GROUP // 2)
    place = output.to(tl.int64)[:, None] * (depth * bits // 8) + (first * bits // 8 + byte)[None, :]
    is_inside = (output < num_outputs)[:, None] & (column < depth)[None, :]
    return column, tl.load(codes + place, mask=is_inside, other=0)


@triton.jit
def _load_scales(scales, minima, output, num_outputs, first, depth, tile_depth: tl.constexpr):
    """Return scales and minima of tile_depth columns: [outputs, groups], 0 after them."""
    num_groups = depth // _GROUP
    group = first // _GROUP + tl.arange(0, tile_depth // _GROUP)
    place = output[:, None] * num_groups + group[None, :]
    is_inside = (output < num_outputs)[:, None] & (group < num_groups)[None, :]
    scale = tl.load(scales + place, mask=is_inside, other=0.0)
    if minima is None:
        minimum = tl.zeros_like(scale)
    else:
        minimum = tl.load(minima + place, mask=is_inside, other=0.0)
    return scale, minimum


@triton.jit
def _repeated(values, width: tl.constexpr):
    """Repeat [N, groups] to float32 [N, width], each value equally often in a row."""
    repeats: tl.constexpr = width // values.shape[1]
    shape: tl.constexpr = (values.shape[0], values.shape[1], repeats)
    return tl.broadcast_to(values.to(tl.float32)[:, :, None], shape).reshape(shape[0], width)


@triton.jit
def _numbers(code):
    """Return the numbers of codes of 8 bits, float32.

    The bits of a float of 8 bits, moved to those of a float32, are 2**-120 of it.
    """
    if code.dtype == tl.int8:
        wide = code.to(tl.int32)
        bits = (wide & 0x7F) << 20 | wide & -0x80000000
        return bits.to(tl.float32, bitcast=True) * 2.0**120
    return code.to(tl.float32)


@triton.jit
def _widened(code):
    """Convert codes to float32, exactly: added to 2**23, whose last bits they are."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def load_columns(rows, row, is_row, column, depth):
    """Return some columns of some rows of a matrix [T, depth], zeros outside."""
    is_inside = is_row[:, None] & (column < depth)[None, :]
    place = rows + row.to(tl.int64)[:, None] * depth + column[None, :]
    return tl.load(place, mask=is_inside, other=0.0)


@triton.jit
def add_product(sums, left, right):
    """Add the products of left [M, columns] and right [N, columns], in the dtype of the left."""
    return tl.dot(left, tl.trans(right.to(left.dtype)), sums, input_precision="ieee")


@triton.jit
def _round_rows(rows, out, scales, size, activation: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    is_inside = column < size
    if activation is not None:
        gate = tl.load(rows + row * 2 * size + column, mask=is_inside, other=0.0).to(tl.float32)
        up = tl.load(rows + (row * 2 + 1) * size + column, mask=is_inside, other=0.0)
        gated = activate(gate, activation) * up.to(tl.float32)
        values = gated.to(rows.dtype.element_ty).to(tl.float32)  # as if it had been stored
    else:
        values = tl.load(rows + row * size + column, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(values), axis=0), _LARGEST_FP8), 1e-30)
    rounded = _round_to_fp8(tl.clamp(tl.div_rn(values, scale), -_LARGEST_FP8, _LARGEST_FP8))
    tl.store(out + row * size + column, rounded.to(out.dtype.element_ty), mask=is_inside)
    # NaN if a value is not finite: maxima and the limits drop NaN.
    tl.store(scales + row, scale + tl.sum(values * 0.0, axis=0))


@triton.jit
def _round_to_fp8(values):
    """Round to 3 bits after the leading one, and no finer than 2**-9.

    The conversion to 8 bits is then exact: Triton's interpreter loses carries where it rounds.
    """
    power = (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Adding a number this much larger leaves no room for finer bits.
    coarse = tl.maximum(power, 2.0**-6) * (1.5 * 2.0**20)
    return (values + coarse) - coarse
