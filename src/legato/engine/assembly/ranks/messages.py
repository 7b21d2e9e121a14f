"""What crosses the boundary between rank 0, which is the engine, and the other ranks' processes."""

import msgspec

from legato.core.config import EngineConfig
from legato.engine.process.messages import EngineFailed
from legato.executor.ranks.messages import RankReport, ToRank


class BeRank(msgspec.Struct, frozen=True, tag=True):
    """To a new process: load this rank's part of the model."""

    config: EngineConfig
    rank: int


class Join(msgspec.Struct, frozen=True, tag=True):
    """To a rank: meet the others, and see what room there is for a cache.

    Attributes:
        meeting_point: see `ProcessGroup.join`.
    """

    meeting_point: str


class MakeCache(msgspec.Struct, frozen=True, tag=True):
    """To a rank: have so many blocks.

    Attributes:
        num_host_slots: blocks that host memory is kept for.
    """

    num_blocks: int
    num_host_slots: int


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """From a rank: it has done what it was told of the start.

    Attributes:
        cache_bytes: room for the cache, as of `Rank.cache_bytes`; known once it has joined.
    """

    cache_bytes: int = 0


FromLead = BeRank | Join | MakeCache | ToRank
FromRank = RankReady | EngineFailed | RankReport
