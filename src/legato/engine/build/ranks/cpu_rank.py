"""A rank on a CPU."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from legato.engine.build.blueprint import Blueprint
from legato.engine.build.cpu import CpuShard
from legato.engine.build.runtime import ModelRuntime
from legato.executor.cache_memory import cpu_cache_bytes
from legato.executor.ranks.agreement import Agreement
from legato.executor.ranks.divided import DividedModel
from legato.executor.ranks.lockstep import HostFollower, LeadAttention, LeadExecutor, LeadModel
from legato.executor.ranks.rank_messages import Followers
from legato.executor.untaken_pages import UntakenPages
from legato.kv.manager import KVCacheManager
from legato.model.decoder import Decoder
from legato.model.model import CacheSpec
from legato.model.native_model import NativeModel
from legato.model.process_group import ProcessGroup


class CpuRank:
    """A `Rank`. Ranks share the machine's cores."""

    blocks_on_lost_rank = False
    untaken: UntakenPages | None = None

    def __init__(self, blueprint: Blueprint, rank: int) -> None:
        num_ranks = blueprint.config.model.tensor_parallel_size
        self._blueprint = blueprint
        self._num_threads = max(1, torch.get_num_threads() // num_ranks)
        self._group = ProcessGroup(rank, num_ranks)
        agreement = Agreement(self._group)
        self._shard = CpuShard(blueprint, agreement, num_threads=self._num_threads)
        model = self._shard.model
        assert isinstance(model, Decoder | NativeModel)
        self._divided = DividedModel(model, agreement)

    def join(self, meeting_point: Path) -> None:
        self._group.join(meeting_point)

    def cache_bytes(self) -> int:
        return cpu_cache_bytes(self._blueprint.config.cache)

    def make_cache(self, sizes: Sequence[int], num_states: int) -> None:
        self._shard.make_cache(sizes, num_states)
        self.untaken = self._shard.untaken

    def follower(self, host_sizes: Sequence[int], num_host_states: int) -> HostFollower:
        torch.set_num_threads(self._torch_threads)
        shard = self._shard
        host_cache = shard.host_cache(host_sizes, num_host_states)
        return HostFollower(self._divided, shard.attention, shard.states, host_cache)

    def runtime(self, cache: CacheSpec, kv: KVCacheManager, followers: Followers) -> ModelRuntime:
        return self._shard.runtime(
            cache,
            kv,
            model=LeadModel(self._divided, followers, num_torch_threads=self._torch_threads),
            attention=LeadAttention(self._shard.attention),
            executor=partial(LeadExecutor, followers=followers),
        )

    @property
    def _torch_threads(self) -> int:
        return self._divided.own.num_torch_threads or self._num_threads
