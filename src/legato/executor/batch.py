"""The packed batch: all chunks of a step, one after the other without padding between them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from legato.core.plan import ScheduledChunk
from legato.core.rows import RowCounts
from legato.executor.sequence import SequenceState

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class FlatChunks(NamedTuple):
    """The chunks of a step as int64 arrays [R].

    Attributes:
        firsts: row of each chunk's first token.
        starts: position of that token within its request.
        counts: tokens of each chunk, one row each.
        num_samples: how many of its last rows are sampled.
    """

    firsts: Int64s
    starts: Int64s
    counts: Int64s
    num_samples: Int64s

    @classmethod
    def of(cls, chunks: Sequence[ScheduledChunk]) -> "FlatChunks":
        counts = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
        return cls(
            firsts=counts.cumsum() - counts,
            starts=np.array([chunk.start for chunk in chunks], dtype=np.int64),
            counts=counts,
            num_samples=np.array([chunk.num_samples for chunk in chunks], dtype=np.int64),
        )

    def rows(self) -> "FlatRows":
        """Return the rows of all chunks."""
        chunk = np.arange(len(self.counts)).repeat(self.counts)
        row = np.arange(len(chunk))
        return FlatRows(
            chunk,
            position=row + (self.starts - self.firsts)[chunk],
            num_left=(self.firsts + self.counts)[chunk] - row,
        )

    def sampled(self, rows: "FlatRows") -> Int64s:
        """Return the sampled ones of the rows [S]."""
        return (rows.num_left <= self.num_samples[rows.chunk]).nonzero()[0]


class FlatRows(NamedTuple):
    """The rows of a step as int64 arrays [T].

    Attributes:
        chunk: index of each row's chunk.
        position: of its token within the request.
        num_left: rows of its chunk from this one on.
    """

    chunk: Int64s
    position: Int64s
    num_left: Int64s


class PackedChunk(NamedTuple):
    """One request's rows [row_start, row_end) of a batch.

    Attributes:
        start: position of the first row's token; tokens [0, start) are in the cache already.
        context_len: keys visible to the last row.
    """

    row_start: int
    row_end: int
    start: int
    context_len: int

    @property
    def num_tokens(self) -> int:
        return self.row_end - self.row_start


class PackedBlockTable(NamedTuple):
    """Where a group of layers has the keys and values of the batch; see `PackedBatch`."""

    slot_mapping: Int64s
    block_table: Int32s


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of R chunks; S rows are sampled.

    The model's inputs are on its device, padded to P and Q rows; the last P - T and Q - S results
    are not read. The inputs of attention are in host memory: a backend first makes its own view of
    them, once a step, and some backends need the values to do so.

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
        windows: the same two of each window group of the cache, whose layers do not read the blocks
            that the window has passed.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    sample_rows: torch.Tensor
    slot_mapping: Int64s
    query_start: Int32s
    context_len: Int32s
    block_table: Int32s
    windows: tuple[PackedBlockTable, ...] = ()

    def of_group(self, index: int) -> "PackedBatch":
        """Return the batch as the layers of a cache group see it; group 0 is no window group."""
        if not index:
            return self
        own = self.windows[index - 1]
        return replace(self, slot_mapping=own.slot_mapping, block_table=own.block_table, windows=())

    def first_rows(self, num_rows: int) -> "PackedBatch":
        """Return the batch with only its first rows, none of them padding.

        `sample_rows` are as many as before: dropped rows among them become row 0.
        """
        num_chunks = int(self.query_start.searchsorted(num_rows))
        query_start = self.query_start[: num_chunks + 1].clip(max=num_rows)
        context_len = self.context_len[:num_chunks].copy()
        context_len[-1] -= self.query_start[num_chunks] - num_rows
        return PackedBatch(
            input_ids=self.input_ids[:num_rows],
            positions=self.positions[:num_rows],
            sample_rows=self.sample_rows.where(self.sample_rows < num_rows, 0),
            slot_mapping=self.slot_mapping[:num_rows],
            query_start=query_start,
            context_len=context_len,
            block_table=self.block_table[:num_chunks],
            windows=tuple(
                PackedBlockTable(own.slot_mapping[:num_rows], own.block_table[:num_chunks])
                for own in self.windows
            ),
        )

    @property
    def chunks(self) -> list[PackedChunk]:
        """The R chunks, for backends that go through them one by one."""
        firsts, ends = self.query_start[:-1], self.query_start[1:]
        columns = firsts, ends, self.context_len - (ends - firsts), self.context_len
        return list(map(PackedChunk, *(column.tolist() for column in columns)))


def pack(
    chunks: Sequence[ScheduledChunk],
    sequences: Sequence[SequenceState],
    *,
    block_size: int,
    device: torch.device,
    padding: RowCounts,
) -> PackedBatch:
    """Pack a plan's chunks, at least one, for a model on `device`.

    Args:
        padding: the model's `rows`.
    """
    flat = FlatChunks.of(chunks)
    rows = flat.rows()
    query_start = np.zeros(len(chunks) + 1, dtype=np.int32)
    query_start[1:] = flat.counts.cumsum()
    block = rows.position // block_size  # [T]

    def located(block_rows: Sequence[Int32s]) -> PackedBlockTable:
        table = _block_table(block_rows)
        slots = (table[rows.chunk, block] - block) * block_size + rows.position
        return PackedBlockTable(slots, table)

    def padded(values: Int64s) -> torch.Tensor:
        zeros = np.zeros(padding.padded(len(values)), dtype=np.int64)
        zeros[: len(values)] = values
        return torch.from_numpy(zeros).to(device, non_blocking=True)

    pairs = list(zip(chunks, sequences, strict=True))
    own = located([sequence.block_row(chunk.block_ids) for chunk, sequence in pairs])
    windows = tuple(
        located([sequence.window_row(i, chunk.window_block_ids[i]) for chunk, sequence in pairs])
        for i in range(len(chunks[0].window_block_ids))
    )
    return PackedBatch(
        input_ids=padded(token_ids(chunks, sequences)),
        positions=padded(rows.position),
        sample_rows=padded(flat.sampled(rows)),
        slot_mapping=own.slot_mapping,
        query_start=query_start,
        context_len=(flat.starts + flat.counts).astype(np.int32),
        block_table=own.block_table,
        windows=windows,
    )


def token_ids(chunks: Sequence[ScheduledChunk], sequences: Sequence[SequenceState]) -> Int64s:
    """Return the tokens of all chunks [T], each from its sequence."""
    parts = [s.token_ids[c.start : c.end] for c, s in zip(chunks, sequences, strict=True)]
    return np.concatenate(parts)


def _block_table(rows: Sequence[Int32s]) -> Int32s:
    table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table
