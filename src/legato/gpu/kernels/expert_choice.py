"""Picks the experts of each row from the router's logits, a program a row.

A score and its expert are one integer: the better the score, the larger; of equal scores, that of
the lower expert. So one maximum finds both, and no two integers are equal.
"""

import torch
import triton
import triton.language as tl

from legato.gpu.kernels.norm import num_warps
from legato.model.mlp_spec import MoeSpec

_LARGEST = tl.constexpr(0x7FFFFFFF)
"""Of int32. As a float's bits, it is NaN."""
_TAKEN = tl.constexpr(-(2**63))
"""Less than any score's integer."""


def pick_experts(
    logits: torch.Tensor,
    spec: MoeSpec,
    bias: torch.Tensor | None,
    selection_bias: torch.Tensor | None,
    expert_scale: torch.Tensor | None,
    slots: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Pick the experts of each row, and their weights, as `legato.model.experts.Router` does.

    The best expert comes first; of experts with the same score, the first one; NaN is the best
    score. `softmax_of_active` picks by logits, so its experts are always PyTorch's. The last bits
    of exponentials and sums may not be PyTorch's, and so the choice between other scores that
    differ in these alone, and the last bits of weights. Each row gets A different experts.

    Args:
        logits: float32 [T, num_experts], contiguous, without `bias`.
        bias, selection_bias, expert_scale: float32 [num_experts]; None if there are none.
        slots: int32 [T]; negative for padding, for which nothing is written.
        experts: int64 [T, A], contiguous; written.
        weights: float32 [T, A], contiguous; written.
    """
    group_size = spec.num_experts // spec.num_groups
    most_groups = triton.next_power_of_2(spec.num_groups)
    most_members = triton.next_power_of_2(group_size)
    _pick[(len(logits),)](
        logits,
        bias,
        selection_bias,
        expert_scale,
        slots,
        experts,
        weights,
        spec.num_groups,
        group_size,
        spec.group_scores,
        spec.num_active_groups,
        spec.num_active,
        spec.factor,
        score=spec.score,
        is_normalized=spec.is_normalized,
        most_groups=most_groups,
        most_members=most_members,
        most_active=triton.next_power_of_2(spec.num_active),
        num_warps=num_warps(most_groups * most_members),
    )


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _pick(
    logits,
    bias,
    selection_bias,
    expert_scale,
    slots,
    experts,
    weights,
    num_groups,
    group_size,
    group_scores,
    num_active_groups,
    num_active,
    factor,
    score: tl.constexpr,
    is_normalized: tl.constexpr,
    most_groups: tl.constexpr,
    most_members: tl.constexpr,
    most_active: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots + row) < 0:
        return
    logits += row * num_groups * group_size
    group, member = tl.arange(0, most_groups), tl.arange(0, most_members)
    expert = group[:, None] * group_size + member[None, :]
    is_expert = (group < num_groups)[:, None] & (member < group_size)[None, :]
    logit = _logits(logits, bias, expert, is_expert)
    highest = tl.max(logit)
    total = tl.sum(tl.exp(logit - highest))
    choice = _scores(logit, highest, total, score)
    if selection_bias is not None:
        choice += tl.load(selection_bias + expert, mask=is_expert, other=0.0)
    ranks = tl.where(is_expert, _ranks(choice, expert), _TAKEN)
    if most_groups > 1:
        rest, sums = ranks, tl.zeros([most_groups], tl.float32)
        for _ in range(group_scores):
            best = tl.max(rest, axis=1)
            sums += _ranked_score(best)
            rest = tl.where(rest == best[:, None], _TAKEN, rest)
        group_ranks = tl.where(group < num_groups, _ranks(sums, group), _TAKEN)
        is_active = group < 0
        for _ in range(num_active_groups):
            is_best = group_ranks == tl.max(group_ranks)
            is_active |= is_best
            group_ranks = tl.where(is_best, _TAKEN, group_ranks)
        ranks = tl.where(is_active[:, None], ranks, _TAKEN)
    place = tl.arange(0, most_active)
    picked = tl.zeros([most_active], tl.int32)
    for i in range(num_active):
        best = tl.max(ranks)
        picked = tl.where(place == i, _LARGEST - best.to(tl.int32), picked)
        ranks = tl.where(ranks == best, _TAKEN, ranks)
    is_place = place < num_active
    logit = _logits(logits, bias, picked, is_place)
    if score == "softmax_of_active":
        highest = tl.max(logit)
        total = tl.sum(tl.exp(logit - highest))
        weight = _scores(logit, highest, total, "softmax")
    else:
        weight = _scores(logit, highest, total, score)
        if is_normalized:
            weight = tl.div_rn(weight, tl.sum(weight) + 1e-20)
    if expert_scale is not None:
        weight *= tl.load(expert_scale + picked, mask=is_place, other=0.0)
    tl.store(experts + row * num_active + place, picked.to(tl.int64), mask=is_place)
    tl.store(weights + row * num_active + place, weight * factor, mask=is_place)


@triton.jit
def _logits(logits, bias, expert, mask):
    """Return the logits of experts, bias included, and -inf elsewhere."""
    values = tl.load(logits + expert, mask=mask, other=float("-inf"))
    if bias is not None:
        values += tl.load(bias + expert, mask=mask, other=0.0)
    return values


@triton.jit
def _scores(logit, highest, total, score: tl.constexpr):
    """Return scores; a softmax is of logits whose `exp(logit - highest)` sum to `total`.

    Quotients are rounded correctly: approximate ones need not be in the order of the logits.
    """
    scores = logit
    if score == "softmax":
        scores = tl.div_rn(tl.exp(logit - highest), total)
    elif score == "sigmoid":
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logit))
    return scores


@triton.jit
def _ranks(score, index):
    """Return int64: in the upper half, integers in the order of scores; in the lower, indices.

    Zeros of both signs are equal, and NaN is the best score, as in PyTorch's sort.
    """
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    bits = tl.where(score == score, _in_order(bits), _LARGEST)
    return (bits.to(tl.int64) << 32) | (_LARGEST - index)


@triton.jit
def _ranked_score(rank):
    """Return the score of `_ranks`."""
    return _in_order((rank >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _in_order(bits):
    """Map floats' bits to integers in the same order; and these back to the bits."""
    return bits ^ ((bits >> 31) & _LARGEST)
