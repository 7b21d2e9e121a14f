"""Quantizes matrices to the blocks of GGUF files that the `gguf` package only reads.

Rounded to the nearest, without llama.cpp's search for better scales.
"""

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize as quantize_simply

from legato.checkpoint.gguf_blocks import _IQ4_TABLE, FLOAT4_TABLE

LARGE_BLOCK = 256
SMALL = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")
LARGE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


def quantize(values: np.ndarray, kind: str) -> np.ndarray:
    """Return the blocks' bytes [N, ...] of a float32 matrix [N, K]."""
    write = _WRITERS.get(kind)
    if write is None:
        blocks: np.ndarray = quantize_simply(values, GGMLQuantizationType[kind])
        return blocks
    size = LARGE_BLOCK if kind in LARGE else 32
    return write(values.reshape(-1, size)).reshape(len(values), -1)


def _q2_k(x: np.ndarray) -> np.ndarray:
    codes, (d, dmin), scales, minima = _affine(x, group=16, largest=3, most_factor=15)
    return _joined(scales | minima << 4, _pack(codes, (0, 2, 4, 6)), d, dmin)


def _q4_k(x: np.ndarray) -> np.ndarray:
    codes, scales_of_scales, scales, minima = _affine(x, group=32, largest=15, most_factor=63)
    return _joined(*scales_of_scales, _six_bits(scales, minima), _pack(codes, (0, 4)))


def _q5_k(x: np.ndarray) -> np.ndarray:
    codes, scales_of_scales, scales, minima = _affine(x, group=32, largest=31, most_factor=63)
    fifth = _pack(codes >> 4, tuple(range(8)))
    packed = _pack(codes & 15, (0, 4))
    return _joined(*scales_of_scales, _six_bits(scales, minima), fifth, packed)


def _q3_k(x: np.ndarray) -> np.ndarray:
    d, factors, units = _signed_scales(x, group=16, largest=4, most_factor=31)
    codes = _nearest(x, units, np.arange(-4.0, 4))
    third, packed = _pack(codes >> 2, tuple(range(8))), _pack(codes & 3, (0, 2, 4, 6))
    shifted = (factors + 32).astype(np.uint8)
    low = (shifted[:, :8] & 15) | (shifted[:, 8:] & 15) << 4
    high = _pack(shifted >> 4, (0, 2, 4, 6), step=4)
    return _joined(third, packed, low, high, d)


def _q6_k(x: np.ndarray) -> np.ndarray:
    d, factors, units = _signed_scales(x, group=16, largest=32, most_factor=127)
    codes = _nearest(x, units, np.arange(-32.0, 32))
    low = _pack(codes & 15, (0, 4), step=64)
    return _joined(low, _pack(codes >> 4, (0, 2, 4, 6)), factors.astype(np.int8), d)


def _iq4_xs(x: np.ndarray) -> np.ndarray:
    d, factors, units = _signed_scales(x, group=32, largest=113, most_factor=31)
    codes = _nearest(x, units, _IQ4_TABLE)
    shifted = (factors + 32).astype(np.uint16)
    high = ((shifted >> 4) << np.arange(0, 16, 2)).sum(axis=1).astype("<u2")[:, None]
    low = ((shifted[:, ::2] & 15) | (shifted[:, 1::2] & 15) << 4).astype(np.uint8)
    return _joined(d, high, low, _halves_packed(codes))


def _iq4_nl(x: np.ndarray) -> np.ndarray:
    d = (np.abs(x).max(axis=1, keepdims=True) / 113).astype(np.float16)
    return _joined(d, _halves_packed(_nearest(x, d.astype(np.float32), _IQ4_TABLE)))


def _mxfp4(x: np.ndarray) -> np.ndarray:
    exponents = np.frexp(np.abs(x).max(axis=1, keepdims=True) / 6)[1] + 127
    units = np.ldexp(np.float32(1), exponents - 127)
    order = np.argsort(FLOAT4_TABLE, kind="stable")
    codes = order.astype(np.uint8)[_nearest(x, units, FLOAT4_TABLE[order])]
    return _joined(exponents.astype(np.uint8), _halves_packed(codes))


_WRITERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
}


def _affine(
    x: np.ndarray, *, group: int, largest: int, most_factor: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]:
    """Return codes, the two scales of factors, and the factors of scales and of minima."""
    groups = x.reshape(len(x), -1, group)
    low = np.minimum(groups.min(axis=2), 0)
    scales = (groups.max(axis=2) - low) / largest
    d, dmin = (
        (values.max(axis=1, keepdims=True) / most_factor).astype(np.float16)
        for values in (scales, -low)
    )
    wide, wide_min = (np.maximum(v.astype(np.float32), 1e-8) for v in (d, dmin))
    factors = np.clip(np.round(scales / wide), 1, most_factor).astype(np.uint8)
    offsets = np.clip(np.round(-low / wide_min), 0, most_factor).astype(np.uint8)
    codes = (groups + (wide_min * offsets)[..., None]) / (wide * factors)[..., None]
    codes = np.clip(np.round(codes), 0, largest).astype(np.uint8)
    return codes.reshape(x.shape), (d, dmin), factors, offsets


def _signed_scales(
    x: np.ndarray, *, group: int, largest: int, most_factor: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the scale of factors, the groups' factors, and their products [B, groups]."""
    scales = np.abs(x.reshape(len(x), -1, group)).max(axis=2) / largest
    d = (scales.max(axis=1, keepdims=True) / most_factor).astype(np.float16)
    wide = np.maximum(d.astype(np.float32), 1e-8)
    factors = np.clip(np.round(scales / wide), 1, most_factor)
    return d, factors, wide * factors


def _nearest(x: np.ndarray, units: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the index of the ascending number nearest to each value over its group's unit."""
    group = x.shape[1] // units.shape[1]
    scaled = x / np.repeat(np.maximum(units, 1e-30), group, axis=1)
    places: np.ndarray = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, scaled)
    return places.astype(np.uint8)


def _six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    return np.concatenate([first, second, (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4], axis=1)


def _pack(codes: np.ndarray, shifts: tuple[int, ...], step: int | None = None) -> np.ndarray:
    step = 32 if step is None else step
    parts = codes.reshape(len(codes), -1, len(shifts), step)
    packed = sum(parts[:, :, i] << shift for i, shift in enumerate(shifts))
    return np.asarray(packed, np.uint8).reshape(len(codes), -1)


def _halves_packed(codes: np.ndarray) -> np.ndarray:
    return _pack(codes, (0, 4), step=16)


def _joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.ascontiguousarray(p).view(np.uint8) for p in parts], axis=1)
