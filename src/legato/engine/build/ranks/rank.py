"""A rank of a divided model, on a CPU or on a GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from legato.core.config import EngineConfig
from legato.engine.build.blueprint import Blueprint, draw_blueprint
from legato.engine.build.runtime import ModelRuntime
from legato.engine.build.start_timer import StartTimer
from legato.executor.ranks.rank_messages import Follower, Followers
from legato.executor.untaken_pages import UntakenPages
from legato.kv.manager import KVCacheManager
from legato.model.model import CacheSpec


class Rank(Protocol):
    """A rank's part of the model and the cache: it loads, joins the others, and makes its cache.

    Attributes:
        blocks_on_lost_rank: whether a rank that waits for a lost rank waits for ever.
        untaken: the cache's pages to allocate while the rank is idle; None if there are none.
    """

    blocks_on_lost_rank: bool
    untaken: UntakenPages | None

    def join(self, meeting_point: Path) -> None:
        """Wait for the other ranks.

        Raises:
            RankLostError: a rank did not come.
        """
        ...

    def cache_bytes(self) -> int:
        """Return the memory for the cache of all ranks, as if all had as much free as this one.

        All ranks call this and `make_cache` at the same time.
        """
        ...

    def make_cache(self, sizes: Sequence[int], num_states: int) -> None:
        """Make the cache, and get ready for steps.

        Args:
            sizes, num_states: as in `MakeCache`.

        Raises:
            ConfigError: there is not enough memory.
            UnsupportedModelError: the model computes no numbers.
        """
        ...

    def follower(self, host_sizes: Sequence[int], num_host_states: int) -> Follower:
        """Return the object that follows rank 0; called on the other ranks.

        Args:
            host_sizes, num_host_states: as in `MakeCache`.
        """
        ...

    def runtime(self, cache: CacheSpec, kv: KVCacheManager, followers: Followers) -> ModelRuntime:
        """Return the runtime that computes steps on all ranks; called on rank 0.

        Args:
            cache: the whole model's.
        """
        ...


def make_rank(blueprint: Blueprint, rank: int) -> Rank:
    """Load a rank's part; raises like `build_engine`."""
    # Local imports: a GPU's rank needs Triton, and torch.distributed takes a while.
    if blueprint.device.type == "cpu":
        from legato.engine.build.ranks.cpu_rank import CpuRank

        return CpuRank(blueprint, rank)
    from legato.engine.build.ranks.gpu_rank import GpuRank

    return GpuRank(blueprint, rank)


def load_rank(config: EngineConfig, rank: int) -> Rank:
    """Load a rank's part in a process of its own; raises like `build_engine`.

    Args:
        config: as resolved by rank 0.
    """
    assert config.model.num_threads is not None, "the configuration was resolved"
    torch.set_num_threads(config.model.num_threads)
    return make_rank(draw_blueprint(config, None, StartTimer()), rank)
