"""The packed batch: all chunks of a step as flat tensors, without padding."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from legato.core.plan import ScheduledChunk
from legato.core.rows import padded_rows
from legato.executor.sequence import SequenceState


@dataclass(frozen=True)
class PackedChunk:
    """One request's rows [row_start, row_end) of the batch.

    Attributes:
        start: position of the first row's token; tokens [0, start) are in the cache already.
        block_runs: the request's blocks, as runs [first, end) of adjacent ids, in token order.
    """

    row_start: int
    row_end: int
    start: int
    block_runs: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        return self.row_end - self.row_start

    @property
    def context_len(self) -> int:
        """Keys visible to the last row."""
        return self.start + self.num_tokens


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of R chunks, S rows of which are sampled.

    What the model computes is padded (`padded_rows`) to P and Q rows; what comes of the last P - T
    and Q - S is not read.

    Attributes:
        input_ids: int64 [P].
        positions: int64 [P], of each token within its request.
        slot_mapping: int64 [T], where each token's key and value go: block id * block size +
            offset.
        chunks: R rows' extents and blocks, in the order of the plan.
        sample_rows: int64 [Q].
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    chunks: tuple[PackedChunk, ...]
    sample_rows: torch.Tensor


def pack(
    chunks: Sequence[ScheduledChunk],
    sequences: Sequence[SequenceState],
    *,
    block_size: int,
    device: torch.device,
) -> PackedBatch:
    """Lay the chunks of a plan out side by side, on `device`."""
    packed: list[PackedChunk] = []
    slots: list[int] = []
    positions: list[int] = []
    sample_rows: list[int] = []
    for chunk, sequence in zip(chunks, sequences, strict=True):
        row = len(positions)
        positions.extend(range(chunk.start, chunk.end))
        slots.extend(_slots(chunk, block_size))
        sample_rows.extend(
            range(row + chunk.num_tokens - chunk.num_samples, row + chunk.num_tokens)
        )
        runs = sequence.block_runs(chunk.block_ids)
        packed.append(PackedChunk(row, len(positions), chunk.start, runs))
    padding = [0] * (padded_rows(len(positions)) - len(positions))
    input_ids = [s.token_ids[c.start : c.end] for c, s in zip(chunks, sequences, strict=True)]
    input_ids.append(torch.tensor(padding, dtype=torch.int64))
    sample_rows += [0] * (padded_rows(len(sample_rows)) - len(sample_rows))
    return PackedBatch(
        input_ids=torch.cat(input_ids).to(device, non_blocking=True),
        positions=_int64(positions + padding, device),
        slot_mapping=_int64(slots, device),
        chunks=tuple(packed),
        sample_rows=_int64(sample_rows, device),
    )


def _slots(chunk: ScheduledChunk, block_size: int) -> Iterator[int]:
    """Cache slots of the chunk's tokens, block by block."""
    position = chunk.start
    while position < chunk.end:
        index, offset = divmod(position, block_size)
        count = min(block_size - offset, chunk.end - position)
        slot = chunk.block_ids[index] * block_size + offset
        yield from range(slot, slot + count)
        position += count


def _int64(values: Iterable[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64).to(device, non_blocking=True)
