"""Splits blocks of a quantized GGUF tensor into codes and scales. Torch-free.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType

_SCALE = 2  # bytes


class Blocks(NamedTuple):
    """Weights `scale * code + minimum`, 32 in a block.

    Attributes:
        codes: uint8 [B, 32].
        scales: float16 [B].
        minima: float16 [B].
    """

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray
    bits: int


def split_blocks(raw: np.ndarray, kind: GGMLQuantizationType) -> Blocks | None:
    """Split a tensor's bytes [B, bytes of a block]; None for other kinds of quantization."""
    halves = raw.view(np.float16)
    scales = halves[:, 0].copy()
    if kind == GGMLQuantizationType.Q8_0:
        return Blocks(_bytes(raw[:, _SCALE:]), scales, -128 * scales, 8)
    if kind == GGMLQuantizationType.Q4_0:
        return Blocks(_nibbles(raw[:, _SCALE:]), scales, -8 * scales, 4)
    if kind == GGMLQuantizationType.Q4_1:
        minima = halves[:, 1].copy()
        return Blocks(_nibbles(raw[:, 2 * _SCALE :]), scales, minima, 4)
    return None


def _bytes(signed: np.ndarray) -> np.ndarray:
    """Return uint8 [B, 32] for as many signed codes, 128 added to each."""
    words, codes = _words(signed), np.empty(signed.shape, np.uint8)
    out = codes.view(words.dtype)
    signs = _in_each_byte(0x80, words.dtype)
    for column in range(words.shape[1]):
        np.bitwise_xor(words[:, column], signs, out=out[:, column])
    return codes


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Return uint8 [B, 32] for [B, 16]: the lower halves of all bytes come first."""
    words, codes = _words(packed), np.empty((len(packed), 2 * packed.shape[1]), np.uint8)
    num_words, out = words.shape[1], codes.view(words.dtype)
    lower = _in_each_byte(0x0F, words.dtype)
    for column in range(num_words):
        np.bitwise_and(words[:, column], lower, out=out[:, column])
        upper = out[:, num_words + column]
        np.right_shift(words[:, column], 4, out=upper)
        upper &= lower
    return codes


def _words(values: np.ndarray) -> np.ndarray:
    """View uint8 [B, N] as fewer, wider columns, which numpy processes faster than short rows.

    Blocks start at multiples of two bytes, those of Q4_1 at multiples of four.
    """
    is_aligned = values.strides[0] % 4 == 0 and values.ctypes.data % 4 == 0
    return values.view(np.uint32 if is_aligned else np.uint16)


def _in_each_byte(value: int, word: np.dtype) -> np.integer[Any]:
    mask: np.integer[Any] = word.type(int.from_bytes(bytes([value]) * word.itemsize))
    return mask
