"""Messages between rank 0, which is the engine, and the processes of the other ranks."""

import msgspec

from legato.core.config import EngineConfig
from legato.engine.process.engine_messages import EngineFailed
from legato.executor.ranks.rank_messages import RankReport, ToRank


class BeRank(msgspec.Struct, frozen=True, tag=True):
    """To a new process: load this rank's part of the model."""

    config: EngineConfig
    rank: int


class Join(msgspec.Struct, frozen=True, tag=True):
    """To a rank: join the others, and measure the free memory for a cache.

    Attributes:
        meeting_point: see `ProcessGroup.join`.
    """

    meeting_point: str


class MakeCache(msgspec.Struct, frozen=True, tag=True):
    """To a rank: make a cache.

    Attributes:
        sizes: blocks of each cache group.
        num_states: slots of recurrent states; 0 without recurrent layers.
        host_sizes: blocks of each group that fit into the swap space in host memory.
        num_host_states: states that fit into it.
    """

    sizes: tuple[int, ...]
    num_states: int
    host_sizes: tuple[int, ...]
    num_host_states: int


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """From a rank: a part of the start is complete.

    Attributes:
        cache_bytes: memory for the cache, as in `Rank.cache_bytes`; after `Join` only.
    """

    cache_bytes: int = 0


FromLead = BeRank | Join | MakeCache | ToRank
FromRank = RankReady | EngineFailed | RankReport
