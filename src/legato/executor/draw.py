"""Draws tokens so that a row's token depends on that row alone, bit for bit.

Weights are integers, and their sums are exact in any order. So neither the other rows of a batch
nor a device's way of splitting a sum can move the border between two tokens, and a token of weight
0 is never drawn. The random numbers come from a counter, not from a generator's state.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_EXACT_BITS = 53
"""Integers below 2**53 are exact in float64."""


def to_scores(
    logits: torch.Tensor, best: torch.Tensor, temperatures: Sequence[float]
) -> torch.Tensor:
    """Return each token's likelihood relative to the row's best token, as a power of two.

    The base is two, not e: torch's exp, unlike its exp2, is slow for arguments that underflow.

    Args:
        logits: float32 [S, V]; overwritten.
        best: float32 [S], the greatest logit of each row.
        temperatures: S entries, none 0.

    Returns:
        float32 [S, V], 0 for the best token.
    """
    halvings = torch.tensor([halving_of(one) for one in temperatures], dtype=torch.float32)
    return logits.sub_(best[:, None]).div_(halvings.to(logits.device)[:, None])


def halving_of(temperature: float) -> float:
    """Return the difference of logits that halves a probability; in the range of float32."""
    limits = torch.finfo(torch.float32)  # outside it, 0 / 0 and inf / inf are possible
    return min(max(temperature * math.log(2), limits.tiny), limits.max)


def to_weights(scores: torch.Tensor) -> torch.Tensor:
    """Return 2**scores as integers, in units so small that all V of a row sum to < 2**53.

    A token 2**-35 times as likely as the best (V = 150 000) still has a weight.

    Args:
        scores: float32 [S, V], from `to_scores`.

    Returns:
        int64 [S, V].
    """
    return scores.exp2().mul_(weight_unit(scores.shape[1])).to(torch.int64)


def weight_unit(vocab_size: int) -> float:
    """Return the weight of the best token."""
    return 2.0 ** (_EXACT_BITS - vocab_size.bit_length())


def pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the token at the given point of each row's cumulative distribution.

    Args:
        weights: int64 [S, V], from `to_weights`; each row has a positive one.
        uniforms: float64 [S], multiples of 2**-53 in [0, 1).

    Returns:
        int64 [S].
    """
    cumulative = weights.cumsum(dim=-1)
    points = (uniforms * cumulative[:, -1]).to(torch.int64)
    return torch.searchsorted(cumulative, points[:, None], right=True)[:, 0]


def uniform_numbers(
    seeds: npt.NDArray[np.int64], num_output_tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the numbers of rows with these seeds and output lengths, both [S].

    Each is output i of a SplitMix64 generator (Steele, Lea and Flood, 2014) that starts at the
    hashed seed. Without the hash, the streams of neighbouring seeds would be shifts of each other.

    Returns:
        float64 [S], multiples of 2**-53 in [0, 1).
    """
    counts = (num_output_tokens + 1).astype(np.uint64)
    bits = _mix(_mix(seeds.astype(np.uint64)) + counts * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer: each bit of the result depends on all 64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
