"""Recurrences row by row, and what they share with pieces of long runs."""

import triton
import triton.language as tl

from legato.gpu.kernels.activation import at_least, at_most

SMALLEST_SQUARE = tl.constexpr(1e-6)
"""Added to the square of a query's or a key's length."""


@triton.jit(do_not_specialize_on_alignment=["runs", "slot_of_row"])
def advance_rows(
    rows,
    steps,
    weights,
    rates,
    bias,
    skips,
    states,
    runs,
    slot_of_row,
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
    padded_key: tl.constexpr,
    value_block: tl.constexpr,
    run_fields: tl.constexpr,
):
    """Advance a run whose states are all kept, for one head and a part of its values."""
    run = runs + tl.program_id(0) * run_fields
    start, end = tl.load(run), tl.load(run + 1)
    if (end - start != 1) & (tl.load(run + 5) == 0):
        return
    head = tl.program_id(1)
    key = tl.arange(0, padded_key)
    value = tl.program_id(2) * value_block + tl.arange(0, value_block)
    is_key, is_value = key < key_dim, value < value_dim
    place = state_places(key, value, key_dim, value_dim, is_delta)
    there = is_key[:, None] & is_value[None, :]
    source = slot(run + 3, head, num_heads, key_dim * value_dim)
    state = tl.load(states + source + place, mask=there, other=0.0)
    for index in range(end - start):
        row = start + index
        own = rows + row.to(tl.int64) * num_channels
        key_place = own + head // group * key_dim + key
        q = tl.load(key_place + first_query, mask=is_key, other=0.0)
        k = tl.load(key_place + first_key, mask=is_key, other=0.0)
        v = tl.load(own + first_value + head * value_dim + value, mask=is_value, other=0.0)
        gate, weight = gates_of(
            steps, weights, rates, bias, row.to(tl.int64) * gate_stride + head, row >= 0, head,
            shortest, longest, is_delta,
        )  # fmt: skip
        if is_delta:
            q = q * tl.rsqrt(tl.sum(q * q, axis=0) + SMALLEST_SQUARE) * key_dim**-0.5
            k = k * tl.rsqrt(tl.sum(k * k, axis=0) + SMALLEST_SQUARE)
        state *= tl.exp(gate)
        change = weight * (v - tl.sum(state * k[:, None], axis=0)) if is_delta else weight * v
        state += k[:, None] * change[None, :]
        destination = slot(slot_of_row + row, head, num_heads, key_dim * value_dim)
        tl.store(states + destination + place, state, mask=there)
        result = tl.sum(state * q[:, None], axis=0)
        if skips is not None:
            result += tl.load(skips + head) * v
        to = out + (row.to(tl.int64) * num_heads + head) * value_dim + value
        tl.store(to, result, mask=is_value)


@triton.jit
def slot(place, head, num_heads: tl.constexpr, size: tl.constexpr):
    """Return where a head's state begins in the slot that a run names at `place`."""
    return (tl.load(place).to(tl.int64) * num_heads + head) * size


@triton.jit
def state_places(
    key, value, key_dim: tl.constexpr, value_dim: tl.constexpr, is_delta: tl.constexpr
):
    """Return the places of [keys, values] within a head's state."""
    key, value = key[:, None], value[None, :]
    return key * value_dim + value if is_delta else value * key_dim + key


@triton.jit
def gates_of(
    steps, weights, rates, bias, place, is_there, head, shortest, longest, is_delta: tl.constexpr
):
    """Return the gates of rows, 0 where there is no row, and the weights of their values."""
    step = tl.load(steps + place, mask=is_there, other=0.0).to(tl.float32)
    step = _softplus(step + tl.load(bias + head))
    if is_delta:
        weight = tl.sigmoid(tl.load(weights + place, mask=is_there, other=0.0).to(tl.float32))
    else:
        step = at_most(at_least(step, shortest), longest)
        weight = step
    return tl.where(is_there, -tl.exp(tl.load(rates + head)) * step, 0.0), weight


@triton.jit
def _softplus(value):
    """Return ln(1 + e^x), with a small relative error where e^x vanishes in the sum.

    The sum's own rounding is divided out (Kahan, 1987).
    """
    power = tl.exp(-tl.abs(value))
    total = 1.0 + power
    added = total - 1.0
    is_lost = added == 0.0
    log = tl.log(total) * (power / tl.where(is_lost, 1.0, added))
    return tl.maximum(value, 0.0) + tl.where(is_lost, power, log)
