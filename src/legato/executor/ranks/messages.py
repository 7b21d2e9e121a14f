"""What rank 0 has the other ranks do, and what they tell of it.

A rank but the first remembers nothing of requests: it is told what to compute, token by token, so
that there is nothing in which it could differ.
"""

from typing import Protocol

import msgspec
import numpy as np
import torch

from legato.core.plan import BlockMove
from legato.executor.batch import Int32s, Int64s, PackedBatch


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Run the layers on a packed batch, of which the arrays are sent as they lie in memory.

    Attributes:
        block_table: rows of `max_blocks`.
        num_layers: None is all.
    """

    input_ids: bytes
    positions: bytes
    slot_mapping: bytes
    query_start: bytes
    context_len: bytes
    block_table: bytes
    max_blocks: int
    num_layers: int | None

    @classmethod
    def of(cls, batch: PackedBatch, num_layers: int | None) -> "Forward":
        return cls(
            input_ids=batch.input_ids.numpy().tobytes(),
            positions=batch.positions.numpy().tobytes(),
            slot_mapping=batch.slot_mapping.tobytes(),
            query_start=batch.query_start.tobytes(),
            context_len=batch.context_len.tobytes(),
            block_table=batch.block_table.tobytes(),
            max_blocks=batch.block_table.shape[1],
            num_layers=num_layers,
        )

    @property
    def batch(self) -> PackedBatch:
        """As it was, but for the rows that are sampled: those are rank 0's."""
        return PackedBatch(
            input_ids=torch.from_numpy(_int64s(self.input_ids)),
            positions=torch.from_numpy(_int64s(self.positions)),
            sample_rows=torch.empty(0, dtype=torch.int64),
            slot_mapping=_int64s(self.slot_mapping),
            query_start=_int32s(self.query_start),
            context_len=_int32s(self.context_len),
            block_table=_int32s(self.block_table).reshape(-1, self.max_blocks),
        )


class Logits(msgspec.Struct, frozen=True, tag=True):
    """Multiply so many rows, which rank 0 has, with the output projection."""

    num_rows: int


class DeviceStep(msgspec.Struct, frozen=True, tag=True):
    """On GPUs: compute a step from what the host tells the device of it, as it lies in memory.

    Attributes:
        num_rows, num_samples, has_chunks: the size that it is computed as.
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
    """How a rank fared in what could not be computed on all of them.

    Attributes:
        error: what it raised; None where another is to blame.
    """

    error: str | None = None
    is_out_of_memory: bool = False


class Follower(Protocol):
    """A rank but the first."""

    def do(self, message: ToRank) -> RankReport | None:
        """Take part; returns what rank 0 waits to be told, where not all ranks could.

        Raises:
            RankLostError: another rank is gone.
            Exception: something failed that nobody waits to be told; the rank is of no more use.
        """
        ...


class Followers(Protocol):
    """All ranks but the first."""

    def tell(self, message: ToRank) -> None:
        """Raises `RankLostError`: one of them is gone."""
        ...

    def reports(self) -> list[RankReport]:
        """One of each, after a failure; raises as `tell`."""
        ...

    def give_up(self) -> None:
        """End them all."""
        ...


def _int64s(data: bytes) -> Int64s:
    return np.frombuffer(bytearray(data), dtype=np.int64)


def _int32s(data: bytes) -> Int32s:
    return np.frombuffer(bytearray(data), dtype=np.int32)
