"""Linear recurrences with decaying states: gated delta nets, and Mamba-2 (`RecurrenceRule`).

A head's state S [K, V] maps keys to values. For each token, with a query q, a key k, a value v, a
gate g <= 0 and a weight w,

    S <- exp(g) S;  S <- S + k u^T;  o = S^T q

where u is w v for Mamba-2, and w (v - S^T k), a correction, for the delta rule. All is float32.

Runs of one row are computed so, and runs that keep the state after each row. Others are computed in
pieces, with products of matrices: with
D the decays between the rows of a piece, and E those since its start,

    U = (I + tril(w k k^T D, -1))^-1 w (V - E K S);  O = E Q S + tril(Q K^T D) U

for the delta rule, and U = w V for Mamba-2. What does not depend on the state, `relate_rows` and
`invert_systems` compute for all pieces at once. `advance_pieces` then goes from piece to piece of
each run, with the state in its destination's slot: in registers, it would leave none for products
in float32.
"""

from typing import NamedTuple

import torch
import triton

from legato.gpu.kernels.recurrence_pieces import advance_pieces, invert_systems, relate_rows
from legato.gpu.kernels.recurrence_rows import advance_rows
from legato.gpu.state_work import PIECE_FIELDS, RUN_FIELDS, StateWork
from legato.model.recurrence import PIECE

_TILE_NUMBERS = 4096
"""Numbers of a state that a program advances by one row."""
_KEY_BLOCK, _VALUE_BLOCK = 16, 32
"""Sizes of products of a piece's rows."""


class RecurrenceRule(NamedTuple):
    """A recurrence of H heads. Queries and keys are shared by groups of adjacent heads.

    Attributes:
        is_delta: it is the gated delta rule, whose queries and keys have length 1; and its states
            are [H, K, V]. If not, it is Mamba-2, and its states are [H, V, K].
        num_key_heads: groups.
        first_query, first_key, first_value: first channels of each, in convolved rows.
        shortest, longest: limits of the steps of Mamba-2.
    """

    is_delta: bool
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    first_query: int
    first_key: int
    first_value: int
    shortest: float = 0.0
    longest: float = float("inf")


class Gates(NamedTuple):
    """What gates and weights are made of: g = -exp(rates) d, for a step d = softplus(steps + bias).

    Attributes:
        steps: [P, H], a part of wider rows.
        weights: [P, H], likewise, whose sigmoids are the weights; None if these are the steps d.
        rates: float32 [H].
        bias: float32 [H].
        skips: float32 [H], factors of values that are added to outputs; None for none.
    """

    steps: torch.Tensor
    weights: torch.Tensor | None
    rates: torch.Tensor
    bias: torch.Tensor
    skips: torch.Tensor | None = None


def advance(
    rule: RecurrenceRule,
    rows: torch.Tensor,
    gates: Gates,
    states: torch.Tensor,
    work: StateWork,
    out: torch.Tensor,
) -> None:
    """Advance each run's state by its rows, from its source's slot to the slots that keep it.

    Args:
        rows: float32 [P, channels], convolved.
        states: float32 [slots, H, ...].
        work: the step's runs; none reads a slot that another one writes.
        out: float32 [P, H * V]; padding is not written.
    """
    padded_key = triton.next_power_of_2(rule.key_dim)
    padded_value = triton.next_power_of_2(rule.value_dim)
    row_block = max(1, min(padded_value, _TILE_NUMBERS // padded_key))
    shape = {
        "is_delta": rule.is_delta,
        "num_heads": rule.num_heads,
        "group": rule.num_heads // rule.num_key_heads,
        "num_channels": rows.shape[1],
        "first_query": rule.first_query,
        "first_key": rule.first_key,
        "key_dim": rule.key_dim,
    }
    values = {"first_value": rule.first_value, "value_dim": rule.value_dim}
    limits = rule.shortest, rule.longest, gates.steps.stride(0)
    advance_rows[len(work.runs), rule.num_heads, triton.cdiv(rule.value_dim, row_block)](
        rows,
        *gates,
        states,
        work.runs,
        work.slot_of_row,
        out,
        *limits,
        **shape,
        **values,
        padded_key=padded_key,
        value_block=row_block,
        run_fields=RUN_FIELDS,
    )
    if not work.num_long_runs:
        return
    scores = rows.new_empty(len(rows), rule.num_heads, PIECE)
    inverses = torch.empty_like(scores) if rule.is_delta else None
    relate_rows[len(work.pieces), rule.num_heads](
        rows,
        *gates[:4],
        work.pieces,
        scores,
        inverses,
        *limits,
        **shape,
        key_block=_KEY_BLOCK,
        piece_rows=PIECE,
        piece_fields=PIECE_FIELDS,
        num_warps=8,
    )
    if inverses is not None:
        invert_systems[len(work.pieces), rule.num_heads](
            inverses,
            work.pieces,
            num_heads=rule.num_heads,
            half=PIECE // 2,
            num_levels=PIECE.bit_length() - 2,
            piece_fields=PIECE_FIELDS,
            num_warps=4,
        )
    num_blocks = triton.cdiv(rule.value_dim, _VALUE_BLOCK)
    advance_pieces[work.num_long_runs, rule.num_heads, num_blocks](
        rows,
        *gates,
        scores,
        inverses,
        states,
        work.runs,
        out,
        *limits,
        **shape,
        **values,
        key_block=_KEY_BLOCK,
        value_block=_VALUE_BLOCK,
        run_fields=RUN_FIELDS,
        piece_rows=PIECE,
        num_warps=8,
    )


# The alignment of a step's inputs depends on its size; do not compile for each alignment.
