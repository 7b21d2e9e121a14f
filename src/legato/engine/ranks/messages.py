"""What crosses the boundary between rank 0, which is the engine, and the other ranks' processes."""

import msgspec

from legato.core.config import EngineConfig
from legato.engine.process.messages import EngineFailed
from legato.executor.ranks.messages import Forward, Logits, Moves, RankReport


class BeRank(msgspec.Struct, frozen=True, tag=True):
    """To a new process: load this rank's part of the model."""

    config: EngineConfig
    rank: int


class MakeCache(msgspec.Struct, frozen=True, tag=True):
    """To a rank: have so many blocks.

    Attributes:
        num_host_slots: blocks that host memory is kept for.
    """

    num_blocks: int
    num_host_slots: int


class Join(msgspec.Struct, frozen=True, tag=True):
    """To a rank: meet the others.

    Attributes:
        meeting_point: see `ProcessGroup.join`.
    """

    meeting_point: str


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """From a rank: it has done what it was told of the start."""


FromLead = BeRank | MakeCache | Join | Forward | Logits | Moves
FromRank = RankReady | EngineFailed | RankReport
