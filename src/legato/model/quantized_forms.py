"""Brings quantized weights to the forms that kernels multiply with, and joins several into one."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from legato.model.quantization import BLOCK, QuantizedWeight

_LARGEST_EXPONENT = 15
"""Of a scale in float16: as large as possible, so that the smallest scales lose no digits."""
_LEAST_EXPONENT = -100
_SIGNED_ZERO = 128
_SIGNED_RANGE = (-128, 127)
_LEAST_GROUP, _GROUP_MULTIPLE = 16, 32


def can_multiply(weight: QuantizedWeight) -> bool:
    """Whether native kernels have products with the weight's groups."""
    group = weight.group
    return group == _LEAST_GROUP or group % _GROUP_MULTIPLE == 0


def native_form(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Join parts as the matrix that native kernels are given; None if they take it as bfloat16.

    If it is stored only, they dequantize blocks of 32 with float16 scales while they pack them.
    """
    if not can_concatenate(parts):
        return None
    whole = concatenate(parts).map(torch.Tensor.contiguous)
    if not whole.is_stored_only:
        return halved(with_whole_table(whole))
    is_simple = whole.table is None and whole.order is None and whole.group == BLOCK
    return whole if is_simple and whole.scales.dtype == torch.float16 else None


def halved(weight: QuantizedWeight) -> QuantizedWeight:
    """Round scales and minima to float16, whose digits and range a common exponent adapts.

    The error of a scale is at most 2**-11 of it, unless it is 2**29 times smaller than the largest.
    Scales that are float16 already do not change.
    """
    if weight.scales.dtype == torch.float16:
        return weight
    largest = float(weight.scales.abs().max())
    if weight.minima is not None:
        largest = max(largest, float(weight.minima.abs().max()))
    exponent = max(math.frexp(largest)[1] - _LARGEST_EXPONENT, _LEAST_EXPONENT)
    factor = 2.0**-exponent
    return replace(
        weight,
        scales=(weight.scales * factor).half(),
        minima=None if weight.minima is None else (weight.minima * factor).half(),
        exponent=exponent,
    )


def with_whole_table(weight: QuantizedWeight) -> QuantizedWeight:
    """Turn a table of 16 floats into bytes, which integer products take.

    Integers, and halves as those of 4-bit floats, stay exact. Others, as those of NF4, are off by
    at most 1/200 of the largest.
    """
    table = weight.table
    if table is None or weight.is_float8 or weight.zero == _SIGNED_ZERO:
        return weight
    unit = _exact_unit(table)
    if unit is None:
        unit = min(_units(table), key=partial(_squared_error, table))
    return replace(
        weight,
        scales=weight.scales if unit == 1.0 else weight.scales.float() * unit,
        table=((table / unit).round() + _SIGNED_ZERO).to(torch.uint8),
        zero=_SIGNED_ZERO,
    )


def in_blocks(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Return the same weight in blocks of 32 with float16 scales and minima; None if it has none.

    Scales of larger groups are repeated. Indices into whole or half numbers, such as MXFP4's,
    become codes of 8 bits. Floats of 8 bits keep float32 scales, without minima.
    """
    if weight.order is not None or weight.group % BLOCK:
        return None
    if weight.is_float8:
        scales = weight.scales.float() * 2.0**weight.exponent
        return _regrouped(replace(weight, scales=scales, exponent=0), BLOCK)
    table = weight.table
    if table is not None and table.is_floating_point() and _exact_unit(table) is None:
        return None
    weight = _without_table(with_whole_table(weight))
    weight = _with_minima(_regrouped(weight, BLOCK))
    assert weight.minima is not None
    scales, minima = weight.scales.half(), weight.minima.half()
    if not (scales.isfinite().all() and minima.isfinite().all()):
        return None
    return replace(weight, scales=scales, minima=minima)


def can_concatenate(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether `concatenate` can join the weights: their inputs have the same order, and so on."""
    first = weights[0]
    if not all(_is_same(weight.order, first.order) for weight in weights):
        return False
    if all(_is_same(weight.table, first.table) for weight in weights):
        return True
    return not any(weight.is_float8 for weight in weights)


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate rows; the result has the widest codes, the smallest groups, minima if any has."""
    if len(weights) == 1:
        return weights[0]
    group = math.gcd(*(weight.group for weight in weights))
    parts = [_regrouped(weight, group) for weight in weights]
    if not all(_is_same(part.table, parts[0].table) for part in parts):
        parts = [_without_table(with_whole_table(part)) for part in parts]
    if len({(part.zero, part.minima is None) for part in parts}) > 1:
        parts = [_with_minima(part) for part in parts]
    dtypes = {part.scales.dtype for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    minima = [part.minima.to(dtype) for part in parts if part.minima is not None]
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales.to(dtype) for part in parts]),
        minima=torch.cat(minima) if minima else None,
        bits=max(part.bits for part in parts),
    )


def _exact_unit(table: torch.Tensor) -> float | None:
    """Return 1 or a half, if a table's numbers are whole in this unit, in 8 bits; else None."""
    return next((unit for unit in (1.0, 0.5) if _is_whole(table / unit)), None)


def _units(table: torch.Tensor) -> list[float]:
    """Return the units in which a table's largest number is whole, and uses most of 8 bits."""
    largest = float(table.abs().max())
    return [largest / count for count in range(100, _SIGNED_RANGE[1] + 1)]


def _squared_error(table: torch.Tensor, unit: float) -> float:
    """Return the squared errors of a table's numbers in a unit, summed."""
    return float(((table / unit).round() * unit - table).square().sum())


def _is_same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _is_whole(values: torch.Tensor) -> bool:
    low, high = _SIGNED_RANGE
    return bool(((values == values.round()) & (values >= low) & (values <= high)).all())


def _regrouped(weight: QuantizedWeight, group: int) -> QuantizedWeight:
    count = weight.group // group
    if count == 1:
        return weight
    return replace(
        weight,
        scales=weight.scales.repeat_interleave(count, dim=1),
        minima=None if weight.minima is None else weight.minima.repeat_interleave(count, dim=1),
    )


def _without_table(weight: QuantizedWeight) -> QuantizedWeight:
    """Replace 4-bit codes by the whole numbers of their table."""
    if weight.table is None:
        return weight
    codes = weight.table[weight.codes.int()]
    return replace(weight, codes=codes, bits=8, table=None)


def _with_minima(weight: QuantizedWeight) -> QuantizedWeight:
    if weight.minima is not None and not weight.zero:
        return weight
    minima = -weight.zero * weight.scales.float()
    if weight.minima is not None:
        minima += weight.minima
    return replace(weight, minima=minima, scales=weight.scales.float(), zero=0)
