"""Recurrences over pieces of long runs, with products of matrices (see `recurrence.py`)."""

import triton
import triton.language as tl

from legato.gpu.kernels.recurrence_rows import SMALLEST_SQUARE, gates_of, slot, state_places


@triton.jit(do_not_specialize_on_alignment=["pieces"])
def relate_rows(
    rows,
    steps,
    weights,
    rates,
    bias,
    pieces,
    scores,
    systems,
    shortest,
    longest,
    gate_stride,
    is_delta: tl.constexpr,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    num_channels: tl.constexpr,
    first_query: tl.constexpr,
    first_key: tl.constexpr,
    key_dim: tl.constexpr,
    key_block: tl.constexpr,
    piece_rows: tl.constexpr,
    piece_fields: tl.constexpr,
):
    """Compute a piece's decayed products of queries and keys for one head, and its system.

    The system is what is below the diagonal of the matrix to invert. Both are
    [piece_rows, piece_rows], at the piece's rows of [P, H, piece_rows].
    """
    piece = pieces + tl.program_id(0) * piece_fields
    num_rows = tl.load(piece + 1)
    if num_rows == 0:
        return
    head = tl.program_id(1)
    index = tl.arange(0, piece_rows)
    is_row = index < num_rows
    first_row = tl.load(piece).to(tl.int64)
    gate, weight = gates_of(
        steps, weights, rates, bias, (first_row + index) * gate_stride + head, is_row, head,
        shortest, longest, is_delta,
    )  # fmt: skip
    is_below = index[:, None] > index[None, :]
    # Each sum is added up on its own: a difference of two sums would have lost what a small gate
    # adds to a large one.
    decay = tl.exp(tl.cumsum(tl.where(is_below, gate[:, None], 0.0), axis=0))

    query_products = tl.zeros([piece_rows, piece_rows], tl.float32)
    key_products = tl.zeros([piece_rows, piece_rows], tl.float32)
    query_square = tl.zeros([piece_rows], tl.float32)
    key_square = tl.zeros([piece_rows], tl.float32)
    own = rows + first_row * num_channels + head // group * key_dim
    for first in range(0, key_dim, key_block):
        key = first + tl.arange(0, key_block)
        there = is_row[:, None] & (key < key_dim)[None, :]
        key_place = index[:, None] * num_channels + key[None, :]
        q = tl.load(own + first_query + key_place, mask=there, other=0.0)
        k = tl.load(own + first_key + key_place, mask=there, other=0.0)
        query_products += _product(q, tl.trans(k))
        if is_delta:
            key_products += _product(k, tl.trans(k))
            query_square += tl.sum(q * q, axis=1)
            key_square += tl.sum(k * k, axis=1)
    if is_delta:
        key_scale = tl.rsqrt(key_square + SMALLEST_SQUARE)
        query_scale = tl.rsqrt(query_square + SMALLEST_SQUARE) * key_dim**-0.5
        query_products *= query_scale[:, None] * key_scale[None, :]
    is_visible = index[:, None] >= index[None, :]
    first_place = (first_row * num_heads + head) * piece_rows
    place = index[:, None] * (num_heads * piece_rows) + index[None, :]
    score = tl.where(is_visible, query_products * decay, 0.0)
    tl.store(scores + first_place + place, score, mask=is_row[:, None])
    if is_delta:
        system = key_products * (weight * key_scale)[:, None] * key_scale[None, :] * decay
        system = tl.where(is_below, system, 0.0)
        tl.store(systems + first_place + place, system, mask=is_row[:, None])


@triton.jit(do_not_specialize_on_alignment=["pieces"])
def invert_systems(
    systems,
    pieces,
    num_heads: tl.constexpr,
    half: tl.constexpr,
    num_levels: tl.constexpr,
    piece_fields: tl.constexpr,
):
    """Replace what is below the diagonal of a piece's matrix by the matrix's inverse.

    The inverse of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']], with A' and B' those of A and B.
    Products of whole matrices would take more registers than there are.
    """
    piece = pieces + tl.program_id(0) * piece_fields
    num_rows = tl.load(piece + 1)
    if num_rows == 0:
        return
    row_stride: tl.constexpr = num_heads * 2 * half
    first_row = tl.load(piece).to(tl.int64)
    upper = systems + first_row * row_stride + tl.program_id(1) * 2 * half
    lower = upper + half * row_stride
    index = tl.arange(0, half)
    place = index[:, None] * row_stride + index[None, :]
    is_upper, is_lower = (index < num_rows)[:, None], (index + half < num_rows)[:, None]
    a = _inverse(tl.load(upper + place, mask=is_upper, other=0.0), num_levels)
    tl.store(upper + place, a, mask=is_upper)
    if num_rows > half:
        b = _inverse(tl.load(lower + half + place, mask=is_lower, other=0.0), num_levels)
        tl.store(lower + half + place, b, mask=is_lower)
        c = tl.load(lower + place, mask=is_lower, other=0.0)
        tl.store(lower + place, -_product(_product(b, c), a), mask=is_lower)


@triton.jit(do_not_specialize_on_alignment=["runs"])
def advance_pieces(
    rows,
    steps,
    weights,
    rates,
    bias,
    skips,
    scores,
    inverses,
    states,
    runs,
    out,
    shortest,
    longest,
    gate_stride,
    is_delta: tl.constexpr,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    num_channels: tl.constexpr,
    first_query: tl.constexpr,
    first_key: tl.constexpr,
    first_value: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_block: tl.constexpr,
    value_block: tl.constexpr,
    run_fields: tl.constexpr,
    piece_rows: tl.constexpr,
):
    """Advance a run that keeps its last state alone, for one head and a part of its values."""
    run = runs + tl.program_id(0) * run_fields
    start = tl.load(run)
    num_rows = tl.load(run + 1) - start
    if (num_rows <= 1) | (tl.load(run + 5) != 0):
        return
    position = tl.load(run + 2)
    stop = position + num_rows
    head = tl.program_id(1)
    value = tl.program_id(2) * value_block + tl.arange(0, value_block)
    index = tl.arange(0, piece_rows)
    source = slot(run + 3, head, num_heads, key_dim * value_dim)
    destination = slot(run + 4, head, num_heads, key_dim * value_dim)
    for number in range(position // piece_rows, (stop + piece_rows - 1) // piece_rows):
        low = tl.maximum(number * piece_rows, position)
        count = tl.minimum((number + 1) * piece_rows, stop) - low
        is_row = index < count
        first_row = (start + low - position).to(tl.int64)
        gate, weight = gates_of(
            steps, weights, rates, bias, (first_row + index) * gate_stride + head, is_row, head,
            shortest, longest, is_delta,
        )  # fmt: skip
        until = tl.exp(tl.cumsum(gate, axis=0))
        is_later = index[:, None] > index[None, :]
        after = tl.exp(tl.sum(tl.where(is_later, gate[:, None], 0.0), axis=0))
        before = states + (source if low == position else destination)
        piece = rows + first_row * num_channels
        own = piece + head // group * key_dim
        read, held, query_square, key_square = _read_state(
            before, own, index, is_row, value, is_delta, num_channels, first_query, first_key,
            key_dim, value_dim, key_block,
        )  # fmt: skip
        is_there = is_row[:, None] & (value < value_dim)[None, :]
        value_place = index[:, None] * num_channels + value[None, :]
        values = piece + first_value + head * value_dim
        v = tl.load(values + value_place, mask=is_there, other=0.0)
        first_place = (first_row * num_heads + head) * piece_rows
        related = index[:, None] * (num_heads * piece_rows) + index[None, :]
        if is_delta:
            key_scale = tl.rsqrt(key_square + SMALLEST_SQUARE)
            query_scale = tl.rsqrt(query_square + SMALLEST_SQUARE) * key_dim**-0.5
            wanted = weight[:, None] * (v - (until * key_scale)[:, None] * held)
            inverse = tl.load(inverses + first_place + related, mask=is_row[:, None], other=0.0)
            change = _narrow_product(inverse, wanted)
            read *= query_scale[:, None]
            after *= key_scale
        else:
            change = weight[:, None] * v
        score = tl.load(scores + first_place + related, mask=is_row[:, None], other=0.0)
        result = until[:, None] * read + _narrow_product(score, change)
        if skips is not None:
            result += tl.load(skips + head) * v
        to = out + (first_row * num_heads + head) * value_dim
        result_place = index[:, None] * (num_heads * value_dim) + value[None, :]
        tl.store(to + result_place, result, mask=is_there)

        # All threads have read the state before some of them change it, and the other way round.
        tl.debug_barrier()
        _change_state(
            before, states + destination, own, index, is_row, value, tl.exp(tl.sum(gate, axis=0)),
            change * after[:, None], is_delta, num_channels, first_key, key_dim,
            value_dim, key_block,
        )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def _read_state(
    state,
    own,
    index,
    is_row,
    value,
    is_delta: tl.constexpr,
    num_channels: tl.constexpr,
    first_query: tl.constexpr,
    first_key: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_block: tl.constexpr,
):
    """Return what a piece's queries, and its keys, read of a state; and the squares of both.

    Only queries of Mamba-2 read, and have no squares.

    Args:
        own: convolved rows from the piece's first one, and the head's first key, on.
    """
    read = tl.zeros([index.shape[0], value.shape[0]], tl.float32)
    held = tl.zeros([index.shape[0], value.shape[0]], tl.float32)
    query_square = tl.zeros([index.shape[0]], tl.float32)
    key_square = tl.zeros([index.shape[0]], tl.float32)
    for first in range(0, key_dim, key_block):
        key = first + tl.arange(0, key_block)
        is_state = (key < key_dim)[:, None] & (value < value_dim)[None, :]
        state_place = state_places(key, value, key_dim, value_dim, is_delta)
        part = tl.load(state + state_place, mask=is_state, other=0.0)
        is_there = is_row[:, None] & (key < key_dim)[None, :]
        place = index[:, None] * num_channels + key[None, :]
        q = tl.load(own + first_query + place, mask=is_there, other=0.0)
        read += _product(q, part)
        if is_delta:
            k = tl.load(own + first_key + place, mask=is_there, other=0.0)
            held += _product(k, part)
            query_square += tl.sum(q * q, axis=1)
            key_square += tl.sum(k * k, axis=1)
    return read, held, query_square, key_square


@triton.jit
def _change_state(
    before,
    state,
    own,
    index,
    is_row,
    value,
    kept,
    change,
    is_delta: tl.constexpr,
    num_channels: tl.constexpr,
    first_key: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_block: tl.constexpr,
):
    """Write a share `kept` of the state `before`, and the products of keys and changes."""
    for first in range(0, key_dim, key_block):
        key = first + tl.arange(0, key_block)
        is_there = (key < key_dim)[:, None] & is_row[None, :]
        place = index[None, :] * num_channels + key[:, None]
        k = tl.load(own + first_key + place, mask=is_there, other=0.0)
        is_state = (key < key_dim)[:, None] & (value < value_dim)[None, :]
        state_place = state_places(key, value, key_dim, value_dim, is_delta)
        part = tl.load(before + state_place, mask=is_state, other=0.0)
        tl.store(state + state_place, kept * part + _product(k, change), mask=is_state)


@triton.jit
def _product(left, right):
    """Multiply matrices of float32 on tensor cores, with three products of rounded parts each."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def _narrow_product(left, right):
    """Multiply [rows, rows] and few columns in float32; parts would take too many registers."""
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _inverse(below, num_levels: tl.constexpr):
    """Return the inverse of I + `below`, which is zero except below its diagonal: [n, n].

    Blocks on the diagonal are inverted, then pairs of adjacent blocks, until there is one block.

    Args:
        num_levels: binary logarithm of n.
    """
    index = tl.arange(0, below.shape[0])
    inverse = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    # Two rows are in blocks of one pair if their highest bit that differs is the level's.
    apart = index[:, None] ^ index[None, :]
    inverse -= tl.where(apart == 1, below, 0.0)
    for level in range(1, num_levels):
        quarter = tl.where((apart >> level) == 1, below, 0.0)
        inverse -= _product(_product(inverse, quarter), inverse)
    return inverse
