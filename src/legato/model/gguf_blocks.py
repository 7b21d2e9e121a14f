"""Blocks of a quantized GGUF tensor as they lie in the file. Torch-free.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from typing import NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType

_SCALE = 2  # bytes


class Blocks(NamedTuple):
    """Weights `scale * code + minimum`, 32 to a block.

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
    """Codes and scales of a tensor's bytes [B, bytes of a block]; None for other kinds."""
    scales = raw[:, :_SCALE].copy().view(np.float16)[:, 0]
    if kind == GGMLQuantizationType.Q8_0:
        return Blocks(_bytes(raw[:, _SCALE:]), scales, -128 * scales, 8)
    if kind == GGMLQuantizationType.Q4_0:
        return Blocks(_nibbles(raw[:, _SCALE:]), scales, -8 * scales, 4)
    if kind == GGMLQuantizationType.Q4_1:
        minima = raw[:, _SCALE : 2 * _SCALE].copy().view(np.float16)[:, 0]
        return Blocks(_nibbles(raw[:, 2 * _SCALE :]), scales, minima, 4)
    return None


def _bytes(signed: np.ndarray) -> np.ndarray:
    """uint8 [B, 32] of as many signed codes."""
    words, codes = _words(signed), np.empty(signed.shape, np.uint8)
    out = _words(codes)
    for column in range(words.shape[1]):
        np.bitwise_xor(words[:, column], 0x8080, out=out[:, column])
    return codes


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [B, 32] of [B, 16]: the lower halves of all bytes come first."""
    words, codes = _words(packed), np.empty((len(packed), 2 * packed.shape[1]), np.uint8)
    num_words, out = words.shape[1], _words(codes)
    for column in range(num_words):
        np.bitwise_and(words[:, column], 0x0F0F, out=out[:, column])
        upper = out[:, num_words + column]
        np.right_shift(words[:, column], 4, out=upper)
        upper &= 0x0F0F
    return codes


def _words(values: np.ndarray) -> np.ndarray:
    """uint8 [B, 2N] as uint16 [B, N], whose columns numpy runs through faster than short rows."""
    return values.view(np.uint16)
