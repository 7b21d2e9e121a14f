"""The packed batch: all chunks of a step, one after the other without padding between them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from legato.core.plan import ScheduledChunk
from legato.core.rows import CPU_ROWS
from legato.executor.sequence import SequenceState

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of R chunks; S rows are sampled.

    The model's inputs are on its device, padded (`CPU_ROWS`) to P and Q rows; the last P - T and
    Q - S results are not read. The inputs of attention are in host memory: a backend first makes
    its own view of them, once a step, and some backends need the values to do so.

    Attributes:
        input_ids: int64 [P].
        positions: int64 [P], position of each token within its request.
        sample_rows: int64 [Q].
        slot_mapping: int64 [T], slot of each token's key and value: block id * block size +
            offset.
        query_start: int32 [R + 1]; request i has rows [query_start[i], query_start[i + 1]).
        context_len: int32 [R], keys visible to the last row of each request.
        block_table: int32 [R, max_blocks], blocks of each request in token order; 0 after the
            last.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    sample_rows: torch.Tensor
    slot_mapping: Int64s
    query_start: Int32s
    context_len: Int32s
    block_table: Int32s


def pack(
    chunks: Sequence[ScheduledChunk],
    sequences: Sequence[SequenceState],
    *,
    block_size: int,
    device: torch.device,
) -> PackedBatch:
    """Pack a plan's chunks, at least one, for a model on `device`."""
    starts = np.array([chunk.start for chunk in chunks])
    num_tokens = np.array([chunk.num_tokens for chunk in chunks])
    num_samples = np.array([chunk.num_samples for chunk in chunks])
    query_start = np.zeros(len(chunks) + 1, dtype=np.int32)
    query_start[1:] = num_tokens.cumsum()
    block_table = _block_table(chunks, sequences)

    request = np.arange(len(chunks)).repeat(num_tokens)  # [T], like the next four arrays
    row = np.arange(len(request))
    positions = row + (starts - query_start[:-1])[request]
    block = positions // block_size
    slot_mapping = (block_table[request, block] - block) * block_size + positions
    sample_rows = (row >= (query_start[1:] - num_samples)[request]).nonzero()[0]
    return PackedBatch(
        input_ids=_padded(_input_ids(chunks, sequences), device),
        positions=_padded(positions, device),
        sample_rows=_padded(sample_rows, device),
        slot_mapping=slot_mapping,
        query_start=query_start,
        context_len=(starts + num_tokens).astype(np.int32),
        block_table=block_table,
    )


def _block_table(chunks: Sequence[ScheduledChunk], sequences: Sequence[SequenceState]) -> Int32s:
    rows = [s.block_row(c.block_ids) for c, s in zip(chunks, sequences, strict=True)]
    table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def _input_ids(chunks: Sequence[ScheduledChunk], sequences: Sequence[SequenceState]) -> Int64s:
    parts = [s.token_ids[c.start : c.end] for c, s in zip(chunks, sequences, strict=True)]
    return np.concatenate(parts)


def _padded(values: Int64s, device: torch.device) -> torch.Tensor:
    """Append zeros, up to a row count for which there are kernels."""
    padded = np.zeros(CPU_ROWS.padded(len(values)), dtype=np.int64)
    padded[: len(values)] = values
    return torch.from_numpy(padded).to(device, non_blocking=True)
