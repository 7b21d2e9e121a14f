"""Samples tokens from logits, a program a row, as `legato.executor.sampler.sample` does.

Weights are integers, so their sums are exact in any order, and filters bisect over scores instead
of sorting them. A score is at most 0. It is compared by its key, the bits of its magnitude: the
lower the key, the likelier the token.
"""

import torch
import triton
import triton.language as tl

from legato.executor.draw import weight_unit
from legato.executor.sampler import NO_TOKEN

NOTHING, GREEDY, DRAWN = 0, 1, 2
"""How to choose a row's token; rows of `NOTHING` are padding."""
FAULTY = -2
"""Replaces the token of a row with logits that are not finite."""

_TILE = 4096
_DEPTH = 8
"""Likely tokens of a row that one lane of a tile can keep."""
_NUM_WARPS = 8

_NOTHING, _DRAWN = tl.constexpr(NOTHING), tl.constexpr(DRAWN)
_NO_TOKEN, _FAULTY = tl.constexpr(NO_TOKEN), tl.constexpr(FAULTY)
_LIKELY_KEY = tl.constexpr(0x41400000)
"""Key of the score -12. Tokens at least as likely are read first, and are enough for most rows."""
_LAST_KEY = tl.constexpr(0x7F800000)
"""Key of the score -inf."""
_NUM_STAGES = tl.constexpr(3)
"""Tiles of a whole row in flight at once: a single row does not fill a GPU."""


def sample_rows(
    logits: torch.Tensor,
    given: torch.Tensor,
    kinds: torch.Tensor,
    halvings: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    lowest_scores: torch.Tensor,
    uniforms: torch.Tensor,
    sample_slots: torch.Tensor,
    last_token: torch.Tensor,
    sampled: torch.Tensor,
) -> None:
    """Sample a token for each of Q rows.

    Args:
        logits: [Q, V] in any floating dtype; not changed.
        given: [Q, V], from the model, before any adjustment.
        kinds: int32 [Q], `NOTHING`, `GREEDY` or `DRAWN`.
        halvings: float32 [Q], the difference of logits that halves a probability.
        top_ks: int32 [Q], 0 for all.
        top_ps: float64 [Q].
        lowest_scores: float32 [Q], of min_p; -inf for all.
        uniforms: float64 [Q], multiples of 2**-53 in [0, 1).
        sample_slots: int32 [Q], index in `last_token` of a row's token.
        last_token: int32 [S + 1]; written, with 0 for `NO_TOKEN` and `FAULTY`.
        sampled: int32 [Q]; written except for padding: a token, `NO_TOKEN` or `FAULTY`.
    """
    num_rows, vocab_size = logits.shape
    tile = min(_TILE, triton.next_power_of_2(vocab_size))
    likely = torch.empty(num_rows, _DEPTH * tile, dtype=logits.dtype, device=logits.device)
    _sample[(num_rows,)](
        logits,
        given,
        kinds,
        halvings,
        top_ks,
        top_ps,
        lowest_scores,
        uniforms,
        sample_slots,
        last_token,
        sampled,
        likely,
        vocab_size,
        unit=weight_unit(vocab_size),
        tile=tile,
        max_depth=_DEPTH,
        num_warps=_NUM_WARPS,
    )


# The alignment of settings depends on the number of rows; do not compile for each alignment.
@triton.jit(
    do_not_specialize_on_alignment=(
        "kinds",
        "halvings",
        "top_ks",
        "top_ps",
        "lowest_scores",
        "uniforms",
        "sample_slots",
        "sampled",
    )
)
def _sample(
    logits,
    given,
    kinds,
    halvings,
    top_ks,
    top_ps,
    lowest_scores,
    uniforms,
    sample_slots,
    last_token,
    sampled,
    likely,
    vocab_size,
    unit: tl.constexpr,
    tile: tl.constexpr,
    max_depth: tl.constexpr,
):
    row = tl.program_id(0)
    kind = tl.load(kinds + row)
    if kind == _NOTHING:
        return
    start = row.to(tl.int64) * vocab_size
    best, token = _likeliest(logits + start, vocab_size, tile)
    if not _is_finite(best):
        token = _FAULTY
        if best == float("-inf"):
            best_given, _ = _likeliest(given + start, vocab_size, tile)
            if _is_finite(best_given):
                token = _NO_TOKEN
    elif kind == _DRAWN:
        halving = tl.load(halvings + row)
        key, total = _filter(
            logits + start,
            likely + row.to(tl.int64) * max_depth * tile,
            vocab_size,
            best,
            halving,
            tl.load(top_ks + row),
            tl.load(top_ps + row),
            tl.load(lowest_scores + row),
            unit,
            tile,
            max_depth,
        )
        point = (tl.load(uniforms + row) * total.to(tl.float64)).to(tl.int64)
        token = _pick(logits + start, vocab_size, best, halving, key, point, unit, tile)
    tl.store(sampled + row, token)
    tl.store(last_token + tl.load(sample_slots + row), tl.maximum(token, 0))


@triton.jit
def _likeliest(row, vocab_size, tile: tl.constexpr):
    """Return the greatest logit (NaN if any logit is) and the lowest token with it."""
    lane = tl.arange(0, tile)
    greatest = tl.full([tile], float("-inf"), tl.float32)
    tokens = lane
    num_nans = tl.zeros([tile], tl.int32)
    for first in tl.range(0, vocab_size, tile, num_stages=_NUM_STAGES):
        logit = _load(row, first + lane, vocab_size)
        num_nans += (logit != logit).to(tl.int32)
        is_greater = logit > greatest
        greatest = tl.where(is_greater, logit, greatest)
        tokens = tl.where(is_greater, first + lane, tokens)
    best = tl.max(greatest, axis=0)
    token = tl.min(tl.where(greatest == best, tokens, vocab_size), axis=0)
    if tl.sum(num_nans, axis=0) > 0:
        best = float("nan")
    return best, token


@triton.jit
def _filter(
    row,
    likely,
    vocab_size,
    best,
    halving,
    top_k,
    top_p,
    lowest_score,
    unit: tl.constexpr,
    tile: tl.constexpr,
    max_depth: tl.constexpr,
):
    """Return the highest key that min_p, top_k and top_p keep, and the total weight kept."""
    key = _magnitude(lowest_score)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    total = _measure(row, vocab_size, best, halving, _LAST_KEY, unit, tile, True, _NUM_STAGES)
    if has_top_k | (top_p < 1.0) | (key < _LAST_KEY):
        num_likely, depth = _gather_likely(row, likely, vocab_size, best, halving, tile, max_depth)
        # A lane with more than max_depth likely tokens has lost some: then all tokens are read.
        num_gathered = tl.where(depth <= max_depth, depth * tile, 0)
        if has_top_k:
            is_enough = (num_gathered > 0) & (num_likely >= top_k)
            source, size = _source(is_enough, likely, num_gathered, row, vocab_size)
            wanted = top_k.to(tl.int64)
            kth = _bisect(source, size, best, halving, wanted, unit, tile, False)
            key = tl.minimum(key, kth)
        if key < _LAST_KEY:
            is_enough = (num_gathered > 0) & (key <= _LIKELY_KEY)
            source, size = _source(is_enough, likely, num_gathered, row, vocab_size)
            total = _measure(source, size, best, halving, key, unit, tile, True)
        if top_p < 1.0:
            wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
            gathered = _measure(likely, num_gathered, best, halving, _LAST_KEY, unit, tile, True)
            source, size = _source(gathered >= wanted, likely, num_gathered, row, vocab_size)
            key = _bisect(source, size, best, halving, wanted, unit, tile, True)
            total = _measure(source, size, best, halving, key, unit, tile, True)
    return key, total


@triton.jit
def _gather_likely(
    row, likely, vocab_size, best, halving, tile: tl.constexpr, max_depth: tl.constexpr
):
    """Return the number of likely tokens, in all and on the fullest lane of the tiles.

    Each lane writes its first likely logits to `likely` [max_depth, tile], then -inf.
    """
    lane = tl.arange(0, tile)
    depth = tl.zeros([tile], tl.int32)
    for first in range(0, vocab_size, tile):
        logit = _load(row, first + lane, vocab_size)
        is_likely = _key(logit, best, halving) <= _LIKELY_KEY
        is_kept = is_likely & (depth < max_depth)
        tl.store(likely + depth * tile + lane, logit.to(likely.dtype.element_ty), mask=is_kept)
        depth += is_likely.to(tl.int32)
    deepest = tl.max(depth, axis=0)
    for level in range(tl.minimum(deepest, max_depth)):
        nothing = tl.full([tile], float("-inf"), likely.dtype.element_ty)
        tl.store(likely + level * tile + lane, nothing, mask=depth <= level)
    tl.debug_barrier()  # threads read what others have written
    return tl.sum(depth, axis=0), deepest


@triton.jit
def _source(is_enough, likely, num_likely, row, vocab_size):
    """Return the likely tokens if they are enough, else all tokens."""
    return tl.where(is_enough, likely, row), tl.where(is_enough, num_likely, vocab_size)


@triton.jit
def _bisect(
    logits,
    size,
    best,
    halving,
    wanted,
    unit: tl.constexpr,
    tile: tl.constexpr,
    by_weight: tl.constexpr,
):
    """Return the lowest key such that tokens up to it reach the `wanted` number, or weight."""
    below = tl.full([], -1, tl.int32)
    key = tl.full([], _LAST_KEY, tl.int32)
    while below + 1 < key:
        middle = below + (key - below) // 2
        is_enough = _measure(logits, size, best, halving, middle, unit, tile, by_weight) >= wanted
        below = tl.where(is_enough, below, middle)
        key = tl.where(is_enough, middle, key)
    return key


@triton.jit
def _measure(
    logits,
    size,
    best,
    halving,
    last_key,
    unit: tl.constexpr,
    tile: tl.constexpr,
    by_weight: tl.constexpr,
    num_stages: tl.constexpr = 1,
):
    """Return the weight, or the number, of tokens with keys up to `last_key`."""
    lane = tl.arange(0, tile)
    total = tl.zeros([tile], tl.int64)
    for first in tl.range(0, size, tile, num_stages=num_stages):
        weight, key = _weight(_load(logits, first + lane, size), best, halving, unit)
        total += tl.where(key <= last_key, weight if by_weight else 1, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _pick(
    row,
    vocab_size,
    best,
    halving,
    last_key,
    point,
    unit: tl.constexpr,
    tile: tl.constexpr,
):
    """Return the first token whose cumulative weight, from token 0 on, exceeds `point`."""
    lane = tl.arange(0, tile)
    first = tl.full([], -tile, tl.int32)
    weight = tl.full([], 0, tl.int64)
    while (weight <= point) & (first + tile < vocab_size):
        point -= weight
        first += tile
        weights = _kept_weights(row, first + lane, vocab_size, best, halving, last_key, unit)
        weight = tl.sum(weights, axis=0)
    weights = _kept_weights(row, first + lane, vocab_size, best, halving, last_key, unit)
    return first + tl.sum((tl.cumsum(weights, axis=0) <= point).to(tl.int32), axis=0)


@triton.jit
def _kept_weights(row, token, vocab_size, best, halving, last_key, unit: tl.constexpr):
    weight, key = _weight(_load(row, token, vocab_size), best, halving, unit)
    return tl.where(key <= last_key, weight, 0)


@triton.jit
def _weight(logit, best, halving, unit: tl.constexpr):
    """Return the int64 weight and the int32 key of each logit."""
    score = tl.div_rn(logit - best, halving)
    return (tl.exp2(score) * unit).to(tl.int64), _magnitude(score)


@triton.jit
def _key(logit, best, halving):
    return _magnitude(tl.div_rn(logit - best, halving))


@triton.jit
def _magnitude(score):
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _load(row, token, size):
    return tl.load(row + token, mask=token < size, other=float("-inf")).to(tl.float32)


@triton.jit
def _is_finite(value):
    return tl.abs(value) < float("inf")
