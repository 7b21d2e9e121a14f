"""What every rank of a divided model has, on whatever it computes."""

from pathlib import Path
from typing import Protocol

import torch

from legato.core.config import EngineConfig
from legato.engine.startup.machinery import Machinery, Wanted
from legato.engine.startup.parts import StartParts
from legato.engine.startup.wanted import wanted_of
from legato.executor.ranks.messages import Follower, Followers
from legato.executor.untaken_pages import UntakenPages
from legato.kv.manager import KVCacheManager
from legato.model.base import CacheSpec


class RankPart(Protocol):
    """A rank's part of model and cache: loaded, joined to the others', and given a cache, in turn.

    Attributes:
        cannot_be_told: whether a rank that waits for another, which is gone, waits for ever.
        untaken: what of the cache's memory may be taken while there is nothing to do.
    """

    cannot_be_told: bool
    untaken: UntakenPages | None

    def join(self, meeting_point: Path) -> None:
        """Wait for the others.

        Raises:
            RankLostError: not all ranks have come.
        """
        ...

    def cache_bytes(self) -> int:
        """What the cache of all ranks may take, were there room for it everywhere as there is here.

        All ranks ask this at the same time, as they do the next.
        """
        ...

    def make_cache(self, num_blocks: int) -> None:
        """Have blocks, and be ready for steps.

        Raises:
            ConfigError: there is no memory for it.
            UnsupportedModelError: the model computes no numbers.
        """
        ...

    def follower(self, num_host_slots: int) -> Follower:
        """What does as rank 0 tells; of any other rank."""
        ...

    def machinery(self, cache: CacheSpec, kv: KVCacheManager, followers: Followers) -> Machinery:
        """What computes steps on all ranks; of rank 0.

        Args:
            cache: of the whole model.
        """
        ...


def make_part(wanted: Wanted, rank: int) -> RankPart:
    """Load it; raises as `build_engine`."""
    # Each is imported where it is asked for: one needs Triton, and torch.distributed takes a while.
    if wanted.device.type == "cpu":
        from legato.engine.startup.host_rank import HostRank

        return HostRank(wanted, rank)
    from legato.engine.startup.gpu_rank import GpuRank

    return GpuRank(wanted, rank)


def load_part(config: EngineConfig, rank: int) -> RankPart:
    """The part of a rank in a process of its own; raises as `build_engine`.

    Args:
        config: as rank 0 resolved it.
    """
    if config.model.num_threads is not None:
        torch.set_num_threads(config.model.num_threads)
    return make_part(wanted_of(config, None, StartParts()), rank)
