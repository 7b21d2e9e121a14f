"""A rank on a CPU."""

from collections.abc import Sequence
from pathlib import Path

import torch

from legato.engine.build.blueprint import Blueprint
from legato.engine.build.cpu_model import (
    check_steps_in_flight,
    cpu_rows,
    load_cpu_model,
    make_attention,
    native_kernels,
    untaken_pages,
)
from legato.engine.build.kv_cache import configured_cache
from legato.engine.build.recurrent import make_state_cache
from legato.engine.build.runtime import ModelRuntime
from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.cache_memory import cpu_cache_bytes
from legato.executor.first_pass import check_forward
from legato.executor.host_cache import HostCache
from legato.executor.ranks.agreement import Agreement
from legato.executor.ranks.divided import DividedModel
from legato.executor.ranks.lockstep import HostFollower, LeadAttention, LeadExecutor, LeadModel
from legato.executor.ranks.rank_messages import Followers
from legato.executor.state_cache import StateCache
from legato.executor.untaken_pages import UntakenPages
from legato.kv.manager import KVCacheManager
from legato.model.decoder import Decoder
from legato.model.model import CacheSpec
from legato.model.native_model import NativeModel
from legato.model.process_group import ProcessGroup


class CpuRank:
    """A `Rank`. Ranks share the machine's cores.

    Attributes:
        attention: the cache of this rank's heads.
        states: of this rank's parts of recurrent layers; None if there are none.
    """

    blocks_on_lost_rank = False
    attention: AttentionBackend
    states: StateCache | None = None
    untaken: UntakenPages | None = None

    def __init__(self, blueprint: Blueprint, rank: int) -> None:
        config, num_ranks = blueprint.config, blueprint.config.model.tensor_parallel_size
        check_steps_in_flight(config)
        self._blueprint = blueprint
        self._num_threads = max(1, torch.get_num_threads() // num_ranks)
        kernels = native_kernels(blueprint, num_threads=self._num_threads)
        self._kernels = "torch" if kernels is None else kernels.instructions
        self._group = ProcessGroup(rank, num_ranks)
        agreement = Agreement(self._group)
        model = load_cpu_model(blueprint, kernels, agreement)
        assert isinstance(model, Decoder | NativeModel)
        self._divided = DividedModel(model, agreement)

    def join(self, meeting_point: Path) -> None:
        self._group.join(meeting_point)

    def cache_bytes(self) -> int:
        return cpu_cache_bytes(self._blueprint.config.cache)

    def make_cache(self, sizes: Sequence[int], num_states: int) -> None:
        model, config = self._divided.own, self._blueprint.config.cache
        cache = configured_cache(self._blueprint, model.cache)
        self.attention = make_attention(
            model, cache.groups(self._blueprint.max_model_len), sizes, config
        )
        self.states = make_state_cache(self._blueprint, self._divided.own.spec.states, num_states)
        self.untaken = untaken_pages(config, self.attention, self.states)

    def follower(self, host_sizes: Sequence[int], num_host_states: int) -> HostFollower:
        torch.set_num_threads(self._torch_threads)
        host_cache = self._host_cache(host_sizes, num_host_states)
        return HostFollower(self._divided, self.attention, self.states, host_cache)

    def runtime(self, cache: CacheSpec, kv: KVCacheManager, followers: Followers) -> ModelRuntime:
        blueprint = self._blueprint
        model = LeadModel(self._divided, followers, num_torch_threads=self._torch_threads)
        attention = LeadAttention(self.attention)
        check_forward(
            model,
            attention,
            block_size=kv.block_size,
            vocab_size=blueprint.checkpoint.spec.vocab_size,
            max_len=blueprint.max_model_len,
            num_layers=blueprint.checkpoint.spec.num_layers,
            states=self.states,
        )
        blueprint.timer.end("first pass")
        executor = LeadExecutor(
            model,
            attention,
            kv.block_size,
            host_cache=self._host_cache(kv.host_sizes, kv.num_host_states),
            grammar=blueprint.grammar,
            states=self.states,
            score_head=blueprint.score_head,
            followers=followers,
        )
        return ModelRuntime(
            blueprint=blueprint,
            model=model,
            cache=cache,
            groups=cache.groups(blueprint.max_model_len),
            kv=kv,
            executor=executor,
            blocks=attention.blocks,
            states=() if self.states is None else self.states.tensors,
            rows=cpu_rows(blueprint.checkpoint.spec, model),
            kernels=self._kernels,
            untaken=self.untaken,
        )

    def _host_cache(self, sizes: Sequence[int], num_states: int) -> HostCache:
        return HostCache(self.attention.blocks, sizes, states=self.states, num_states=num_states)

    @property
    def _torch_threads(self) -> int:
        return self._divided.own.num_torch_threads or self._num_threads
