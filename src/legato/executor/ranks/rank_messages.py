"""Messages between rank 0 and the other ranks.

The other ranks keep no state of requests: rank 0 says which tokens to compute, so their state
cannot diverge from its own.
"""

from typing import Protocol

import msgspec
import numpy as np
import torch

from legato.core.plan import BlockMove, StateChange
from legato.executor.batch import Int32s, Int64s, PackedBatch, PackedBlockTable
from legato.model.states import StepStates


class PackedTable(msgspec.Struct, frozen=True):
    """A `PackedBlockTable` as it lies in memory; `block_table` has rows of `max_blocks`."""

    slot_mapping: bytes
    block_table: bytes
    max_blocks: int

    @classmethod
    def of(cls, slot_mapping: Int64s, block_table: Int32s) -> "PackedTable":
        return cls(slot_mapping.tobytes(), block_table.tobytes(), block_table.shape[1])

    @property
    def table(self) -> PackedBlockTable:
        rows = _int32s(self.block_table).reshape(-1, self.max_blocks)
        return PackedBlockTable(_int64s(self.slot_mapping), rows)


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Run the layers on a packed batch; the arrays are sent as they lie in memory.

    Attributes:
        tables: of each cache group.
        states: of each chunk; empty if the model has no recurrent layers.
        num_layers: layers to run; None for all.
    """

    input_ids: bytes
    positions: bytes
    query_start: bytes
    context_len: bytes
    tables: list[PackedTable]
    states: list[StateChange]
    num_layers: int | None

    @classmethod
    def of(cls, batch: PackedBatch, states: StepStates | None, num_layers: int | None) -> "Forward":
        # A run ends with the fields of its state change: see `StateCache.begin_step`.
        changes = [] if states is None else [StateChange(*run[3:]) for run in states.runs]
        return cls(
            input_ids=batch.input_ids.numpy().tobytes(),
            positions=batch.positions.numpy().tobytes(),
            query_start=batch.query_start.tobytes(),
            context_len=batch.context_len.tobytes(),
            tables=[
                PackedTable.of(batch.slot_mapping, batch.block_table),
                *(PackedTable.of(*table) for table in batch.windows),
            ],
            states=changes,
            num_layers=num_layers,
        )

    @property
    def batch(self) -> PackedBatch:
        """The batch, without the sampled rows: rank 0 samples."""
        own, *windows = (packed.table for packed in self.tables)
        return PackedBatch(
            input_ids=torch.from_numpy(_int64s(self.input_ids)),
            positions=torch.from_numpy(_int64s(self.positions)),
            sample_rows=torch.empty(0, dtype=torch.int64),
            slot_mapping=own.slot_mapping,
            query_start=_int32s(self.query_start),
            context_len=_int32s(self.context_len),
            block_table=own.block_table,
            windows=tuple(windows),
        )


class Logits(msgspec.Struct, frozen=True, tag=True):
    """Multiply `num_rows` rows, which rank 0 has, with the output projection."""

    num_rows: int


class DeviceStep(msgspec.Struct, frozen=True, tag=True):
    """On GPUs: compute a step from the words that the host copies to the device.

    Attributes:
        num_rows, num_samples, has_chunks: size of the step's program.
        words: int32.
        table_changes: int64 [2, count].
    """

    num_rows: int
    num_samples: int
    has_chunks: bool
    words: bytes
    table_changes: bytes


class RowLogits(msgspec.Struct, frozen=True, tag=True):
    """On GPUs: multiply rows of the last step, int32, with the output projection."""

    rows: bytes


class Moves(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks to and from host memory, in this order."""

    moves: tuple[BlockMove, ...]


ToRank = Forward | Logits | DeviceStep | RowLogits | Moves


class RankReport(msgspec.Struct, frozen=True, tag=True):
    """A rank's report on a step that failed.

    Attributes:
        error: the error that it raised; None if another rank raised it.
    """

    error: str | None = None
    is_out_of_memory: bool = False


class Follower(Protocol):
    """A rank after the first."""

    def do(self, message: ToRank) -> RankReport | None:
        """Take part in a message; return a report if the step failed, else None.

        Raises:
            RankLostError: another rank is gone.
            Exception: a failure that rank 0 does not wait to hear of; the rank is unusable.
        """
        ...


class Followers(Protocol):
    """All ranks after the first."""

    def broadcast(self, message: ToRank) -> None:
        """Send a message to each. Raises `RankLostError` if one of them is gone."""
        ...

    def reports(self) -> list[RankReport]:
        """Return one report from each rank after a failure. Raises like `tell`."""
        ...

    def give_up(self) -> None:
        """End all of them."""
        ...


def _int64s(data: bytes) -> Int64s:
    return np.frombuffer(bytearray(data), dtype=np.int64)


def _int32s(data: bytes) -> Int32s:
    return np.frombuffer(bytearray(data), dtype=np.int32)
