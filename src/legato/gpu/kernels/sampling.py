"""Samples tokens from logits, a program a row, as `legato.executor.sampler.sample` does.

Weights are integers, so their sums are exact in any order, and filters bisect over scores instead
of sorting them. A score is at most 0. It is compared by its key, the bits of its magnitude: the
lower the key, the likelier the token.

A filter seldom keeps more than a few hundred tokens. So the likeliest some thousand, the
*candidates*, are gathered in the order of tokens, and filters and the draw read these alone, from
registers. Where they do not suffice, all tokens are read, again and again.
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
"""Also the most candidates of a row."""
_NUM_WARPS = 8

_NOTHING, _DRAWN = tl.constexpr(NOTHING), tl.constexpr(DRAWN)
_NO_TOKEN, _FAULTY = tl.constexpr(NO_TOKEN), tl.constexpr(FAULTY)
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
    candidates = torch.empty(num_rows, 2, tile, dtype=torch.int32, device=logits.device)
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
        candidates,
        vocab_size,
        unit=weight_unit(vocab_size),
        tile=tile,
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
    candidates,
    vocab_size,
    unit: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0)
    kind = tl.load(kinds + row)
    if kind == _NOTHING:
        return
    start = row.to(tl.int64) * vocab_size
    best, token, greatest = _likeliest(logits + start, vocab_size, tile)
    if not _is_finite(best):
        token = _FAULTY
        if best == float("-inf"):
            best_given, _, _ = _likeliest(given + start, vocab_size, tile)
            if _is_finite(best_given):
                token = _NO_TOKEN
    elif kind == _DRAWN:
        token = _draw(
            logits + start,
            candidates + row.to(tl.int64) * 2 * tile,
            vocab_size,
            best,
            greatest,
            tl.load(halvings + row),
            tl.load(top_ks + row),
            tl.load(top_ps + row),
            tl.load(lowest_scores + row),
            tl.load(uniforms + row),
            unit,
            tile,
        )
    tl.store(sampled + row, token)
    tl.store(last_token + tl.load(sample_slots + row), tl.maximum(token, 0))


@triton.jit
def _likeliest(row, vocab_size, tile: tl.constexpr):
    """Return the greatest logit (NaN if any is), the lowest token with it, and each lane's."""
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
    return best, token, greatest


@triton.jit
def _draw(
    row,
    candidates,
    vocab_size,
    best,
    greatest,
    halving,
    top_k,
    top_p,
    lowest_score,
    uniform,
    unit: tl.constexpr,
    tile: tl.constexpr,
):
    """Return a token, drawn from the tokens that min_p, top_k and top_p keep."""
    key = _magnitude(lowest_score)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    # The candidates have all tokens with keys up to this.
    last_known = tl.full([], -1, tl.int32)
    tokens = tl.full([tile], 0, tl.int32)
    weights = tl.zeros([tile], tl.int64)
    keys = tl.full([tile], _LAST_KEY, tl.int32)
    if has_top_k | (top_p < 1.0) | (key < _LAST_KEY):
        last_known, tokens, logit = _gather(
            row, candidates, vocab_size, best, greatest, halving, tile
        )
        weights, keys = _weight(logit, best, halving, unit)
    if has_top_k:
        wanted = top_k.to(tl.int64)
        ones = tl.full([tile], 1, tl.int64)
        kth = _find(
            keys, ones, last_known, row, vocab_size, best, halving, wanted, unit, tile, False
        )
        key = tl.minimum(key, kth)
    total = _total(keys, weights, last_known, row, vocab_size, best, halving, key, unit, tile)
    if top_p < 1.0:
        wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
        key = _find(
            keys, weights, last_known, row, vocab_size, best, halving, wanted, unit, tile, True
        )
        total = _total(keys, weights, last_known, row, vocab_size, best, halving, key, unit, tile)
    point = (uniform * total.to(tl.float64)).to(tl.int64)
    if key <= last_known:
        kept = tl.where(keys <= key, weights, 0)
        at = tl.sum((tl.cumsum(kept, axis=0) <= point).to(tl.int32), axis=0)
        token = tl.sum(tl.where(tl.arange(0, tile) == at, tokens, 0), axis=0)
    else:
        token = _pick(row, vocab_size, best, halving, key, point, unit, tile)
    return token


@triton.jit
def _gather(row, candidates, vocab_size, best, greatest, halving, tile: tl.constexpr):
    """Return the last key whose tokens are all candidates, and their tokens and logits [tile].

    At least half of the lanes have their greatest logit among them. The key is -1 if there are more
    candidates than lanes. What is not filled has logits of -inf.
    """
    ones = tl.full([tile], 1, tl.int64)
    limit = _bisect_known(_magnitude(best - greatest), ones, tl.full([], tile // 2, tl.int64))
    lane = tl.arange(0, tile)
    count = tl.full([], 0, tl.int32)
    for first in tl.range(0, vocab_size, tile, num_stages=_NUM_STAGES):
        logit = _load(row, first + lane, vocab_size)
        is_candidate = (_magnitude(best - logit) <= limit) & (first + lane < vocab_size)
        place = count + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
        is_kept = is_candidate & (place < tile)
        tl.store(candidates + place, first + lane, mask=is_kept)
        tl.store(candidates + tile + place, logit.to(tl.int32, bitcast=True), mask=is_kept)
        count += tl.sum(is_candidate.to(tl.int32), axis=0)
    tl.debug_barrier()  # threads read what others have written
    tokens = tl.load(candidates + lane, mask=lane < count, other=0)
    logits = tl.load(candidates + tile + lane, mask=lane < count, other=0)
    logits = tl.where(lane < count, logits.to(tl.float32, bitcast=True), float("-inf"))
    last_known = _magnitude(tl.div_rn(limit.to(tl.float32, bitcast=True), halving)) - 1
    last_known = tl.where(limit == _LAST_KEY, _LAST_KEY, last_known)
    return tl.where(count <= tile, last_known, -1), tokens, logits


@triton.jit
def _find(
    keys,
    amounts,
    last_known,
    row,
    vocab_size,
    best,
    halving,
    wanted,
    unit: tl.constexpr,
    tile: tl.constexpr,
    by_weight: tl.constexpr,
):
    """Return the lowest key up to which all tokens have the `wanted` number, or weight."""
    key = _bisect_known(keys, amounts, wanted)
    if key > last_known:
        key = _bisect(row, vocab_size, best, halving, last_known, wanted, unit, tile, by_weight)
    return key


@triton.jit
def _total(
    keys,
    weights,
    last_known,
    row,
    vocab_size,
    best,
    halving,
    last_key,
    unit: tl.constexpr,
    tile: tl.constexpr,
):
    """Return the weight of all tokens with keys up to `last_key`."""
    if last_key <= last_known:
        total = _sum_known(keys, weights, last_key)
    else:
        total = _measure(row, vocab_size, best, halving, last_key, unit, tile, True)
    return total


@triton.jit
def _bisect_known(keys, amounts, wanted):
    """Return the lowest key up to which there is the `wanted` amount, or that of -inf."""
    below = tl.full([], -1, tl.int32)
    key = tl.full([], _LAST_KEY, tl.int32)
    while below + 1 < key:
        middle = below + (key - below) // 2
        is_enough = _sum_known(keys, amounts, middle) >= wanted
        below = tl.where(is_enough, below, middle)
        key = tl.where(is_enough, middle, key)
    return key


@triton.jit
def _sum_known(keys, amounts, last_key):
    return tl.sum(tl.where(keys <= last_key, amounts, 0), axis=0)


@triton.jit
def _bisect(
    row,
    vocab_size,
    best,
    halving,
    below,
    wanted,
    unit: tl.constexpr,
    tile: tl.constexpr,
    by_weight: tl.constexpr,
):
    """Return the lowest key such that tokens up to it reach the `wanted` number, or weight.

    It is greater than `below`.
    """
    key = tl.full([], _LAST_KEY, tl.int32)
    while below + 1 < key:
        middle = below + (key - below) // 2
        is_enough = (
            _measure(row, vocab_size, best, halving, middle, unit, tile, by_weight) >= wanted
        )
        below = tl.where(is_enough, below, middle)
        key = tl.where(is_enough, middle, key)
    return key


@triton.jit
def _measure(
    row,
    vocab_size,
    best,
    halving,
    last_key,
    unit: tl.constexpr,
    tile: tl.constexpr,
    by_weight: tl.constexpr,
):
    """Return the weight, or the number, of tokens with keys up to `last_key`."""
    lane = tl.arange(0, tile)
    total = tl.zeros([tile], tl.int64)
    for first in tl.range(0, vocab_size, tile, num_stages=_NUM_STAGES):
        weight, key = _weight(_load(row, first + lane, vocab_size), best, halving, unit)
        total += tl.where(key <= last_key, weight if by_weight else 1, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _pick(row, vocab_size, best, halving, last_key, point, unit: tl.constexpr, tile: tl.constexpr):
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
def _magnitude(score):
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _load(row, token, size):
    return tl.load(row + token, mask=token < size, other=float("-inf")).to(tl.float32)


@triton.jit
def _is_finite(value):
    return tl.abs(value) < float("inf")
