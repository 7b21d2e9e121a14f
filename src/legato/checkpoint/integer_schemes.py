"""Matrices of integer codes: AWQ, GPTQ, and those of compressed-tensors."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Self

import torch

from legato.checkpoint.scheme import (
    FLOATS,
    Header,
    Load,
    Part,
    Parts,
    Uniform,
    affine,
    num_groups,
    unpacked,
)
from legato.core.errors import UnsupportedModelError
from legato.model.quantization import QuantizedWeight, few_rows

logger = logging.getLogger(__name__)

_WORD = 32  # bits
GPTQ_BITS = (4, 8)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of 8 adjacent outputs has its code."""
_SIGNED_ZERO = 128


class Awq(Uniform):
    """AWQ's GEMM layout (Lin et al., 2023, arXiv:2306.00978), packed along outputs."""

    markers = ("qweight",)
    suffixes = ("qweight", "qzeros", "scales")

    def __init__(self, group: int) -> None:
        self._group = group

    def size(self, headers: Mapping[str, Header], _: Load) -> tuple[int, int]:
        depth, num_words = headers["qweight"].shape
        return 8 * num_words, depth

    def parts(self, num_outputs: int, depth: int) -> dict[str, Part]:
        groups = num_groups(depth, self._group)
        return {
            "qweight": Part(("I32",), ((depth, num_outputs // 8),)),
            "qzeros": Part(("I32",), ((groups, num_outputs // 8),)),
            "scales": Part(FLOATS, ((groups, num_outputs),)),
        }

    def read(self, parts: Parts) -> QuantizedWeight:
        codes, zeros = (
            unpacked(parts[name], 4).unflatten(1, (-1, 8))[..., list(_AWQ_PLACES)].flatten(1)  # type: ignore[no-untyped-call]
            for name in ("qweight", "qzeros")
        )
        return affine(codes.t().contiguous(), parts["scales"].t(), zeros.t().int(), 4)


class Gptq:
    """GPTQ (Frantar et al., 2022, arXiv:2210.17323), packed along inputs.

    Args:
        zero_offset: added to stored zeros: 1 in the first version of the format, 0 in the second.
    """

    markers = ("qweight",)
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, bits: int, group: int | None, zero_offset: int) -> None:
        self._bits, self._group, self._zero_offset = bits, group, zero_offset
        self._codes_a_word = _WORD // bits

    def of(self, headers: Mapping[str, Header]) -> "Gptq":
        """Return the scheme of a module, whose bits and groups may be its own (`dynamic`)."""
        columns, words, scales = (headers.get(name) for name in ("g_idx", "qweight", "scales"))
        if columns is None or words is None or scales is None or not (words.shape and scales.shape):
            return self
        depth, num_groups = math.prod(columns.shape), scales.shape[0]
        bits = _WORD * words.shape[0] // (depth or 1)
        if bits not in GPTQ_BITS or not num_groups or depth % num_groups:
            return self
        return Gptq(bits, depth // num_groups, self._zero_offset)

    def size(self, headers: Mapping[str, Header], _: Load) -> tuple[int, int]:
        num_words, num_outputs = headers["qweight"].shape
        return num_outputs, self._codes_a_word * num_words

    def parts(self, num_outputs: int, depth: int) -> dict[str, Part]:
        groups = num_groups(depth, self._group or depth)
        return {
            "qweight": Part(("I32",), ((depth // self._codes_a_word, num_outputs),)),
            "qzeros": Part(("I32",), ((groups, num_outputs // self._codes_a_word),)),
            "scales": Part(FLOATS, ((groups, num_outputs),)),
            "g_idx": Part(("I32",), ((depth,),), is_optional=True),
        }

    def read(self, parts: Parts) -> QuantizedWeight | torch.Tensor:
        codes = unpacked(parts["qweight"].t().contiguous(), self._bits)
        zeros = unpacked(parts["qzeros"], self._bits).t().int() + self._zero_offset
        weight = affine(codes, parts["scales"].t(), zeros, self._bits)
        return in_groups(weight, parts.get("g_idx"))


class PackedIntegers(Uniform):
    """compressed-tensors' pack-quantized: signed codes plus half their range, in words."""

    markers = ("weight_packed",)
    suffixes = (
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
    )

    def __init__(self, bits: int, group: int | None) -> None:
        self._bits, self._group = bits, group
        self._codes_a_word = _WORD // bits

    def size(self, headers: Mapping[str, Header], _: Load) -> tuple[int, int]:
        num_outputs, num_words = headers["weight_packed"].shape
        return num_outputs, self._codes_a_word * num_words

    def parts(self, num_outputs: int, depth: int) -> dict[str, Part]:
        groups = num_groups(depth, self._group or depth)
        zeros = (num_outputs // self._codes_a_word, groups)
        return {
            "weight_packed": Part(("I32",), ((num_outputs, depth // self._codes_a_word),)),
            "weight_scale": Part(FLOATS, ((num_outputs, groups),)),
            "weight_shape": Part(("I64", "I32"), ((2,),), is_optional=True),
            "weight_zero_point": Part(("I32",), (zeros,), is_optional=True),
            "weight_g_idx": Part(("I32",), ((depth,),), is_optional=True),
        }

    def read(self, parts: Parts) -> QuantizedWeight | torch.Tensor:
        codes, scales = unpacked(parts["weight_packed"], self._bits), parts["weight_scale"]
        packed_zeros = parts.get("weight_zero_point")
        if packed_zeros is None:
            zeros = torch.full(scales.shape, 2 ** (self._bits - 1))
        else:
            zeros = unpacked(packed_zeros.t().contiguous(), self._bits).t().int()
        return in_groups(affine(codes, scales, zeros, self._bits), parts.get("weight_g_idx"))


class SignedBytes:
    """compressed-tensors' int-quantized: signed bytes, with scales for rows or groups."""

    markers = ("weight_scale",)
    suffixes = ("weight", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point")

    def __init__(self, group: int | None) -> None:
        self._group = group

    def of(self, headers: Mapping[str, Header]) -> Self | None:
        return self if "weight" not in headers or headers["weight"].dtype == "I8" else None

    def size(self, headers: Mapping[str, Header], _: Load) -> tuple[int, int]:
        num_outputs, depth = headers["weight"].shape
        return num_outputs, depth

    def parts(self, num_outputs: int, depth: int) -> dict[str, Part]:
        groups = num_groups(depth, self._group or depth)
        shapes = ((num_outputs, groups), *(_ONE_SCALE if self._group is None else ()))
        return {
            "weight": Part(("I8",), ((num_outputs, depth),)),
            "weight_scale": Part(FLOATS, shapes),
            "weight_zero_point": Part(("I8",), shapes, is_optional=True),
        }

    def read(self, parts: Parts) -> QuantizedWeight:
        weight = parts["weight"]
        codes = weight.view(torch.uint8) ^ _SIGNED_ZERO
        num_rows = len(weight)
        scales, zeros = parts["weight_scale"], parts.get("weight_zero_point")
        scales = scales.reshape(-1, scales.shape[-1] if scales.ndim else 1).expand(num_rows, -1)
        if zeros is None:
            zeros = torch.zeros(1, dtype=torch.int8)
        zeros = zeros.reshape(-1, zeros.shape[-1] if zeros.ndim else 1).expand(scales.shape)
        return affine(codes, scales.contiguous(), zeros.int() + _SIGNED_ZERO, 8)


_ONE_SCALE = ((), (1,), (1, 1))


def in_groups(
    weight: QuantizedWeight, group_of: torch.Tensor | None
) -> QuantizedWeight | torch.Tensor:
    """Sort columns by their groups, so that each group's are adjacent ("act-order").

    Args:
        weight: in whose form groups are adjacent, although they are not yet.
        group_of: int32 [K], the group of each column; None if they are adjacent.

    Returns:
        The weight with the order of its inputs; dequantized, if groups differ in size.

    Raises:
        UnsupportedModelError: a column names a group that there is not.
    """
    depth, group = weight.shape[1], weight.group
    if group_of is None or torch.equal(group_of, torch.arange(depth) // group):
        return weight
    groups = group_of.long()
    if int(groups.min()) < 0 or int(groups.max()) >= depth // group:
        raise UnsupportedModelError("its columns name groups that it does not have")
    if bool((groups.bincount(minlength=depth // group) == group).all()):
        order = groups.argsort(stable=True)
        return replace(weight, codes=weight.codes[:, order], order=order.int())
    logger.warning("matrices whose groups differ in size are widened")
    # Each column becomes a group, a few rows at a time.
    values = torch.empty(weight.shape)
    for rows in few_rows(len(values)):
        few = weight.map(itemgetter(rows))
        minima = None if few.minima is None else few.minima[:, groups]
        values[rows] = replace(few, scales=few.scales[:, groups], minima=minima).dequantize()
    return values
