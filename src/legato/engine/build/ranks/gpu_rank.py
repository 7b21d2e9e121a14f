"""A rank on a GPU of its own."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from legato.engine.build.blueprint import Blueprint
from legato.engine.build.gpu import GpuShard
from legato.engine.build.runtime import ModelRuntime
from legato.executor.ranks.rank_messages import Followers
from legato.executor.untaken_pages import UntakenPages
from legato.gpu import device
from legato.gpu.ranks import GpuFollower, GpuLeadExecutor
from legato.kv.manager import KVCacheManager
from legato.model.model import CacheSpec
from legato.model.process_group import ProcessGroup


class GpuRank:
    """A `Rank`."""

    untaken: UntakenPages | None = None

    def __init__(self, blueprint: Blueprint, rank: int) -> None:
        self._device = device.CudaDevice(torch.device(blueprint.device.type, rank))
        self._group = ProcessGroup(
            rank, blueprint.config.model.tensor_parallel_size, self._device.torch_device
        )
        self.blocks_on_lost_rank = self._device.torch_device.type != "cpu"
        self._shard = GpuShard(blueprint, self._device, self._group)

    def join(self, meeting_point: Path) -> None:
        self._group.join(meeting_point)

    def cache_bytes(self) -> int:
        return self._shard.cache_bytes()

    def make_cache(self, sizes: Sequence[int], num_states: int) -> None:
        self._shard.make_cache(sizes, num_states)

    def follower(self, host_sizes: Sequence[int], num_host_states: int) -> GpuFollower:
        assert not num_host_states, "no GPU swaps states"
        shard = self._shard
        return GpuFollower(
            shard.program, self._device, shard.runner, depth=shard.depth, host_sizes=host_sizes
        )

    def runtime(self, cache: CacheSpec, kv: KVCacheManager, followers: Followers) -> ModelRuntime:
        return self._shard.runtime(cache, kv, partial(GpuLeadExecutor, followers=followers))
