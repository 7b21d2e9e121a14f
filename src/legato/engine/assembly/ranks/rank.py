"""A rank of a divided model, on whatever it computes."""

from pathlib import Path
from typing import Protocol

import torch

from legato.core.config import EngineConfig
from legato.engine.assembly.blueprint import Blueprint, draw_blueprint
from legato.engine.assembly.runtime import ModelRuntime
from legato.engine.assembly.start_timer import StartTimer
from legato.executor.ranks.messages import Follower, Followers
from legato.executor.untaken_pages import UntakenPages
from legato.kv.manager import KVCacheManager
from legato.model.base import CacheSpec


class Rank(Protocol):
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

    def runtime(self, cache: CacheSpec, kv: KVCacheManager, followers: Followers) -> ModelRuntime:
        """What computes steps on all ranks; of rank 0.

        Args:
            cache: of the whole model.
        """
        ...


def make_rank(blueprint: Blueprint, rank: int) -> Rank:
    """Load it; raises as `build_engine`."""
    # Each is imported where it is asked for: one needs Triton, and torch.distributed takes a while.
    if blueprint.device.type == "cpu":
        from legato.engine.assembly.ranks.cpu_rank import CpuRank

        return CpuRank(blueprint, rank)
    from legato.engine.assembly.ranks.gpu_rank import GpuRank

    return GpuRank(blueprint, rank)


def load_rank(config: EngineConfig, rank: int) -> Rank:
    """A rank in a process of its own; raises as `build_engine`.

    Args:
        config: as rank 0 resolved it.
    """
    if config.model.num_threads is not None:
        torch.set_num_threads(config.model.num_threads)
    return make_rank(draw_blueprint(config, None, StartTimer()), rank)
