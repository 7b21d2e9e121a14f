"""Splits blocks of a quantized GGUF tensor into codes, scales and minima. Torch-free.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

_FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the 4-bit floats (e2m1)."""
FLOAT4_TABLE = np.array([*_FLOAT4, *(-value for value in _FLOAT4)], np.float32) / 2
_IQ4_TABLE = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32
)


class GgufBlocks(NamedTuple):
    """Weights `scale * (number - zero) + minimum`; a number is a code or the table's entry for it.

    Attributes:
        codes: uint8 [B, weights of a block].
        scales: float16 or, if they are products, float32 [B, groups of a block].
        minima: of the same dtype and shape; None if all are 0.
        zero: the number of weight 0, if there are no minima.
        table: float32 [16].
    """

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None
    bits: int
    zero: int = 0
    table: np.ndarray | None = None


def split_blocks(raw: np.ndarray, kind: Kind) -> GgufBlocks | None:
    """Split a tensor's bytes [B, bytes of a block]; None for other kinds of quantization."""
    split = _SPLITTERS.get(kind)
    return None if split is None else split(raw)


def _split_q8_0(raw: np.ndarray) -> GgufBlocks:
    return GgufBlocks(_signed_bytes(raw[:, 2:]), _halves(raw, 0), None, 8, 128)


def _split_q4_0(raw: np.ndarray) -> GgufBlocks:
    return GgufBlocks(_nibbles(raw[:, 2:]), _halves(raw, 0), None, 4, 8)


def _split_q4_1(raw: np.ndarray) -> GgufBlocks:
    return GgufBlocks(_nibbles(raw[:, 4:]), _halves(raw, 0), _halves(raw, 2), 4)


def _split_q5_0(raw: np.ndarray) -> GgufBlocks:
    return GgufBlocks(_five_bits(raw[:, 6:], raw[:, 2:6]), _halves(raw, 0), None, 8, 16)


def _split_q5_1(raw: np.ndarray) -> GgufBlocks:
    codes = _five_bits(raw[:, 8:], raw[:, 4:8])
    return GgufBlocks(codes, _halves(raw, 0), _halves(raw, 2), 8)


def _split_iq4_nl(raw: np.ndarray) -> GgufBlocks:
    return GgufBlocks(_nibbles(raw[:, 2:]), _halves(raw, 0), None, 4, table=_IQ4_TABLE)


def _split_mxfp4(raw: np.ndarray) -> GgufBlocks:
    scales = power_of_two(raw[:, :1])
    return GgufBlocks(_nibbles(raw[:, 1:]), scales, None, 4, table=FLOAT4_TABLE)


def _split_q2_k(raw: np.ndarray) -> GgufBlocks:
    """16 groups of 16: bytes of scale and minimum, codes of 2 bits, both scales of these."""
    factors = raw[:, :16]
    codes = _shifted(raw[:, 16:80], (0, 2, 4, 6), 3)
    scales = _halves(raw, 80).astype(np.float32) * (factors & 15)
    minima = -_halves(raw, 82).astype(np.float32) * (factors >> 4)
    return GgufBlocks(codes, scales, minima, 4)


def _split_q3_k(raw: np.ndarray) -> GgufBlocks:
    """16 groups of 16: third bits, codes of 2 bits, scales of 6 bits in 12 bytes, their scale."""
    third = _each_bit(raw[:, :32])
    codes = _shifted(raw[:, 32:96], (0, 2, 4, 6), 3)
    codes |= third << 2
    packed = raw[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = np.concatenate([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    factors = (low | high << 4).astype(np.float32) - 32
    return GgufBlocks(codes, _halves(raw, 108).astype(np.float32) * factors, None, 4, 4)


def _split_q4_k(raw: np.ndarray) -> GgufBlocks:
    return GgufBlocks(_shifted(raw[:, 16:], (0, 4), 15), *_k_scales(raw), 4)


def _split_q5_k(raw: np.ndarray) -> GgufBlocks:
    codes = _shifted(raw[:, 48:], (0, 4), 15)
    codes |= _each_bit(raw[:, 16:48]) << 4
    return GgufBlocks(codes, *_k_scales(raw), 8)


def _split_q6_k(raw: np.ndarray) -> GgufBlocks:
    """16 groups of 16: lower 4 bits, upper 2 bits, signed scales of 8 bits, their scale."""
    low = _shifted(raw[:, :128], (0, 4), 15, step=64)
    codes = low | _shifted(raw[:, 128:192], (0, 2, 4, 6), 3) << 4
    factors = raw[:, 192:208].view(np.int8)
    return GgufBlocks(codes, _halves(raw, 208).astype(np.float32) * factors, None, 8, 32)


def _split_iq4_xs(raw: np.ndarray) -> GgufBlocks:
    """8 groups of 32: scale, upper 2 bits and lower 4 bits of the groups' factors, codes."""
    high = raw[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], axis=-1).reshape(len(raw), 8)
    factors = (low | high.astype(np.uint8) << 4).astype(np.float32) - 32
    codes = _nibbles(raw[:, 8:].reshape(-1, 16)).reshape(len(raw), -1)
    return GgufBlocks(
        codes, _halves(raw, 0).astype(np.float32) * factors, None, 4, table=_IQ4_TABLE
    )


def _split_tq2_0(raw: np.ndarray) -> GgufBlocks:
    return GgufBlocks(_shifted(raw[:, :64], (0, 2, 4, 6), 3), _halves(raw, 64), None, 4, 1)


def _split_q1_0(raw: np.ndarray) -> GgufBlocks:
    """One group of 128: their scale, and a bit each, whose weights are the scale or its negative.

    Format: PrismML's; the `gguf` package has its sizes alone.
    """
    codes = np.unpackbits(raw[:, 2:], axis=1, bitorder="little")
    scales = _halves(raw, 0)
    return GgufBlocks(codes, 2 * scales, -scales, 4)


_SPLITTERS: dict[Kind, Callable[[np.ndarray], GgufBlocks]] = {
    Kind.Q8_0: _split_q8_0,
    Kind.Q4_0: _split_q4_0,
    Kind.Q4_1: _split_q4_1,
    Kind.Q5_0: _split_q5_0,
    Kind.Q5_1: _split_q5_1,
    Kind.IQ4_NL: _split_iq4_nl,
    Kind.MXFP4: _split_mxfp4,
    Kind.Q2_K: _split_q2_k,
    Kind.Q3_K: _split_q3_k,
    Kind.Q4_K: _split_q4_k,
    Kind.Q5_K: _split_q5_k,
    Kind.Q6_K: _split_q6_k,
    Kind.IQ4_XS: _split_iq4_xs,
    Kind.TQ2_0: _split_tq2_0,
    Kind.Q1_0: _split_q1_0,
}


SPLIT_TYPES = frozenset(_SPLITTERS)


def power_of_two(exponents: np.ndarray) -> np.ndarray:
    """Return float32 2**(e - 127) of 8-bit exponents (e8m0); NaN for 255."""
    values = np.ldexp(np.float32(1), np.minimum(exponents, 254).astype(np.int32) - 127)
    return np.where(exponents == 255, np.float32(np.nan), values)


def _k_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and minima of 8 groups: 6 bits of each in 12 bytes, after their scales."""
    first, second, third = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    factors = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    offsets = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    scales = _halves(raw, 0).astype(np.float32) * factors
    return scales, -_halves(raw, 2).astype(np.float32) * offsets


def _halves(raw: np.ndarray, place: int) -> np.ndarray:
    """Return the float16 number at a place of each block, [B, 1]."""
    return raw[:, place : place + 2].copy().view(np.float16)


def _shifted(packed: np.ndarray, shifts: tuple[int, ...], mask: int, step: int = 32) -> np.ndarray:
    """Return codes [B, N]: each `step` bytes have `step` codes at the first shift, and so on."""
    num_blocks, num_bytes = packed.shape
    codes = np.empty((num_blocks, num_bytes // step, len(shifts), step), np.uint8)
    parts = packed.reshape(num_blocks, -1, step)
    for index, shift in enumerate(shifts):
        np.right_shift(parts, shift, out=codes[:, :, index])
    codes &= mask
    return codes.reshape(num_blocks, -1)


def _each_bit(packed: np.ndarray) -> np.ndarray:
    """Return bits [B, 8 N] of bytes [B, N]: the lowest bits of all bytes come first."""
    return _shifted(packed, tuple(range(8)), 1, step=packed.shape[1])


def _five_bits(lower: np.ndarray, fifth: np.ndarray) -> np.ndarray:
    """Return codes [B, 32] of 4 bits as `_nibbles` and bits in the order of codes [B, 4]."""
    bits = np.unpackbits(fifth, axis=1, bitorder="little")
    codes = _nibbles(lower)
    codes |= bits << 4
    return codes


def _signed_bytes(signed: np.ndarray) -> np.ndarray:
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
