"""Causal convolutions of recurrent layers, over packed runs and the inputs that states keep."""

import torch
import triton
import triton.language as tl

from legato.gpu.state_work import RUN_FIELDS, StateWork

_ROWS, _CHANNELS = 8, 128
"""Of a program, in a step with runs of several rows; in other steps, it has one row."""


def convolve(
    rows: torch.Tensor,
    kept: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    work: StateWork,
    out: torch.Tensor,
    *,
    is_gated: bool = False,
) -> None:
    """Convolve each run channel by channel, and keep the last inputs of the states that are kept.

    A row's sum has the same order wherever its request is cut.

    Args:
        rows: [P, C], a part of wider rows or all of them; or, gated, [P, 3C]: factors of inputs,
            factors of results, and inputs.
        kept: [slots, k - 1, C], the inputs that states keep.
        weight: [C, 1, k], the last for a row itself.
        bias: [C]; None for none.
        work: the step's runs; none reads a slot that another one writes.
        out: float32 [P, C], after SiLU; or, gated, in the dtype of `rows`, without it. Padding is
            not written.
    """
    num_rows, num_channels = out.shape
    num_tile_rows = _ROWS if work.num_long_runs else 1
    grid = triton.cdiv(num_rows, num_tile_rows), triton.cdiv(num_channels, _CHANNELS)
    _convolve[grid](
        rows,
        kept,
        weight,
        bias,
        work.run_of_row,
        work.slot_of_row,
        work.runs,
        out,
        rows.stride(0),
        num_rows,
        num_channels,
        num_inputs=kept.shape[1],
        run_fields=RUN_FIELDS,
        is_gated=is_gated,
        num_tile_rows=num_tile_rows,
        num_tile_channels=_CHANNELS,
    )


# The alignment of a step's inputs depends on its size; do not compile for each alignment.
@triton.jit(do_not_specialize_on_alignment=["run_of_row", "slot_of_row", "runs"])
def _convolve(
    rows,
    kept,
    weight,
    bias,
    run_of_row,
    slot_of_row,
    runs,
    out,
    row_stride,
    num_rows,
    num_channels,
    num_inputs: tl.constexpr,
    run_fields: tl.constexpr,
    is_gated: tl.constexpr,
    num_tile_rows: tl.constexpr,
    num_tile_channels: tl.constexpr,
):
    row = (tl.program_id(0) * num_tile_rows + tl.arange(0, num_tile_rows))[:, None]
    channel = (tl.program_id(1) * num_tile_channels + tl.arange(0, num_tile_channels))[None, :]
    run = runs + tl.load(run_of_row + row, mask=row < num_rows, other=0) * run_fields
    start, end = tl.load(run), tl.load(run + 1)
    is_channel = channel < num_channels
    is_there = (row >= start) & (row < end) & is_channel
    source = tl.load(run + 3).to(tl.int64) * num_inputs * num_channels + channel
    slot = tl.load(slot_of_row + row, mask=row < num_rows, other=-1)
    is_kept = is_there & (slot >= 0)
    to = kept + slot.to(tl.int64) * num_inputs * num_channels + channel
    weights = weight + channel * (num_inputs + 1)
    total = tl.zeros([num_tile_rows, num_tile_channels], tl.float32)
    for tap in range(num_inputs):
        earlier = row - num_inputs + tap
        is_own = earlier >= start
        own = _inputs(rows, earlier, row_stride, channel, num_channels, is_there & is_own, is_gated)
        place = kept + source + (num_inputs + earlier - start) * num_channels
        before = tl.load(place, mask=is_there & (earlier < start), other=0.0)
        taps = tl.load(weights + tap, mask=is_channel, other=0.0).to(tl.float32)
        found = tl.where(is_own, own, before)
        total += found.to(tl.float32) * taps
        tl.store(to + (tap - 1) * num_channels, found, mask=is_kept & (tap > 0))
    own = _inputs(rows, row, row_stride, channel, num_channels, is_there, is_gated)
    taps = tl.load(weights + num_inputs, mask=is_channel, other=0.0).to(tl.float32)
    total += own.to(tl.float32) * taps
    tl.store(to + (num_inputs - 1) * num_channels, own, mask=is_kept)
    if bias is not None:
        total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    if is_gated:
        factor = rows + row.to(tl.int64) * row_stride + num_channels + channel
        result = total * tl.load(factor, mask=is_there, other=0.0).to(tl.float32)
    else:
        result = total * tl.sigmoid(total)
    place = out + row.to(tl.int64) * num_channels + channel
    tl.store(place, result.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _inputs(rows, row, row_stride, channel, num_channels, is_there, is_gated: tl.constexpr):
    """Return rows' inputs, rounded as states keep them: the same in any step."""
    place = rows + row.to(tl.int64) * row_stride + channel
    inputs = tl.load(place, mask=is_there, other=0.0)
    if is_gated:
        others = tl.load(place + 2 * num_channels, mask=is_there, other=0.0)
        inputs = (inputs.to(tl.float32) * others.to(tl.float32)).to(rows.dtype.element_ty)
    return inputs
