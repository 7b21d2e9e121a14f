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
        return Blocks(raw[:, _SCALE:] ^ 0x80, scales, -128 * scales, 8)  # from signed codes
    if kind == GGMLQuantizationType.Q4_0:
        return Blocks(_nibbles(raw[:, _SCALE:]), scales, -8 * scales, 4)
    if kind == GGMLQuantizationType.Q4_1:
        minima = raw[:, _SCALE : 2 * _SCALE].copy().view(np.float16)[:, 0]
        return Blocks(_nibbles(raw[:, 2 * _SCALE :]), scales, minima, 4)
    return None


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [B, 32] of [B, 16]: the lower halves of all bytes come first."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=1)
