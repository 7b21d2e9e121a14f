"""Builds the runtime of a model on a CPU: native layers if they can run, else PyTorch's."""

from collections.abc import Callable, Sequence

import msgspec
import torch

from legato.core.cache_config import CacheConfig
from legato.core.errors import ConfigError
from legato.core.rows import RowCounts
from legato.engine.build.blueprint import Blueprint
from legato.engine.build.cpu_model import load_cpu_model, make_attention, native_kernels
from legato.engine.build.draft import LoadedDraft, load_draft, make_draft_model
from legato.engine.build.kv_cache import configured_cache, make_kv_manager
from legato.engine.build.recurrent import make_state_cache
from legato.engine.build.runtime import ModelRuntime
from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.cache_memory import cpu_cache_bytes
from legato.executor.draft_model import DraftModel
from legato.executor.first_pass import check_forward
from legato.executor.host_cache import HostCache
from legato.executor.state_cache import StateCache
from legato.executor.torch_executor import TorchExecutor
from legato.executor.untaken_pages import UntakenPages
from legato.kv.manager import KVCacheManager
from legato.model.communicator import ALONE, Communicator
from legato.model.model import CacheSpec, Model
from legato.model.native_kernels import NativeKernels
from legato.model.spec import DecoderSpec
from legato.model.transformers_spec import TransformersSpec


def cpu_runtime(blueprint: Blueprint) -> ModelRuntime:
    """Load the model and make its cache; raises like `build_engine`."""
    shard = CpuShard(blueprint)
    cache = configured_cache(blueprint, shard.model.cache)
    draft = _load_draft(blueprint, shard.kernels)
    groups = cache.groups(blueprint.max_model_len)
    kv = make_kv_manager(blueprint, groups, _cache_bytes(blueprint.config.cache, cache, draft))
    shard.make_cache(kv.group_sizes, kv.num_states)
    blueprint.timer.end("cache")
    draft_model = _draft_model(blueprint, draft, kv.num_blocks)
    return shard.runtime(cache, kv, draft_model=draft_model)


class CpuShard:
    """A model on a CPU, or a rank's part of it: its layers, then its cache.

    Args:
        communicator: connects the ranks that have the other parts.
        num_threads: of native kernels; None for as many as PyTorch has.

    Attributes:
        kernels: of native layers; None if PyTorch computes the layers.
        attention: the cache of keys and values; set by `make_cache`, like the next two.
        states: of recurrent layers; None if there are none.
        untaken: the cache's pages to allocate while the engine is idle; None if there are none.
    """

    attention: AttentionBackend
    states: StateCache | None = None
    untaken: UntakenPages | None = None

    def __init__(
        self,
        blueprint: Blueprint,
        communicator: Communicator = ALONE,
        *,
        num_threads: int | None = None,
    ) -> None:
        """Load the weights; raises like `build_engine`."""
        if blueprint.config.scheduler.num_steps_in_flight != 1:
            raise ConfigError(
                "two steps in flight are for a GPU: on a CPU both would want the same cores"
            )
        self._blueprint = blueprint
        self.kernels = native_kernels(blueprint, num_threads=num_threads)
        blueprint.timer.end("description")
        self.model = load_cpu_model(blueprint, self.kernels, communicator)
        blueprint.timer.end("weights")

    def make_cache(self, sizes: Sequence[int], num_states: int) -> None:
        """Make the cache; one of a given size is allocated now.

        Args:
            sizes: blocks of each cache group.
            num_states: slots of recurrent layers' states; 0 without such layers.

        Raises:
            ConfigError: there is not enough memory.
        """
        blueprint, config = self._blueprint, self._blueprint.config
        groups = configured_cache(blueprint, self.model.cache).groups(blueprint.max_model_len)
        self.attention = make_attention(self.model, groups, sizes, config.cache)
        shapes = blueprint.checkpoint.spec.part(config.model.tensor_parallel_size).states
        self.states = make_state_cache(blueprint, shapes, num_states)
        if config.cache.kv_cache_memory_bytes is None and config.cache.take_memory_when_idle:
            self.untaken = UntakenPages(*self._state_tensors, *self.attention.blocks)

    def host_cache(self, sizes: Sequence[int], num_states: int) -> HostCache:
        """Return swap space for so many blocks of each cache group, and so many states."""
        return HostCache(self.attention.blocks, sizes, states=self.states, num_states=num_states)

    def runtime(
        self,
        cache: CacheSpec,
        kv: KVCacheManager,
        *,
        model: Model | None = None,
        attention: AttentionBackend | None = None,
        executor: Callable[..., TorchExecutor] = TorchExecutor,
        draft_model: DraftModel | None = None,
    ) -> ModelRuntime:
        """Return the model's runtime; called on the only shard, or on rank 0's.

        Args:
            cache: the whole model's.
            model, attention, executor: for the ranks together; by default, for this shard alone.

        Raises:
            UnsupportedModelError: the model computes no numbers.
        """
        blueprint, spec = self._blueprint, self._blueprint.checkpoint.spec
        model, attention = model or self.model, attention or self.attention
        check_forward(
            model,
            attention,
            block_size=kv.block_size,
            vocab_size=spec.vocab_size,
            max_len=blueprint.max_model_len,
            num_layers=spec.num_layers,
            states=self.states,
        )
        blueprint.timer.end("first pass")
        return ModelRuntime(
            blueprint=blueprint,
            model=model,
            cache=cache,
            groups=cache.groups(blueprint.max_model_len),
            kv=kv,
            executor=executor(
                model,
                attention,
                kv.block_size,
                host_cache=self.host_cache(kv.host_sizes, kv.num_host_states),
                grammar=blueprint.grammar,
                states=self.states,
                score_head=blueprint.score_head,
            ),
            blocks=attention.blocks,
            states=self._state_tensors,
            rows=_rows(spec, model),
            kernels=_kernels(spec, self.kernels),
            untaken=self.untaken,
            draft_model=draft_model,
        )

    @property
    def _state_tensors(self) -> Sequence[torch.Tensor]:
        return () if self.states is None else self.states.tensors


def _load_draft(blueprint: Blueprint, kernels: NativeKernels | None) -> LoadedDraft | None:
    """Load the draft model before the free memory is measured for the cache."""
    name = blueprint.config.model.speculative_model
    if name is None:
        return None
    draft = load_draft(blueprint, name, kernels)
    blueprint.timer.end("draft model")
    return draft


def _cache_bytes(config: CacheConfig, cache: CacheSpec, draft: LoadedDraft | None) -> int:
    """Return the memory of the model's cache; a draft model's cache holds as many tokens."""
    num_bytes = cpu_cache_bytes(config)
    if draft is None:
        return num_bytes
    return num_bytes * cache.token_bytes // (cache.token_bytes + draft.cache.token_bytes)


def _draft_model(
    blueprint: Blueprint, draft: LoadedDraft | None, num_blocks: int
) -> DraftModel | None:
    if draft is None:
        return None
    draft_model = make_draft_model(draft, num_blocks)
    blueprint.timer.end("draft model")
    return draft_model


def _rows(spec: DecoderSpec | TransformersSpec, model: Model) -> RowCounts:
    """Return what the time of a step depends on, besides the number of its rows."""
    if isinstance(spec, TransformersSpec):
        return model.rows
    return msgspec.structs.replace(model.rows, experts=spec.expert_counts)


def _kernels(spec: DecoderSpec | TransformersSpec, kernels: NativeKernels | None) -> str:
    """Return what computes the layers, in words."""
    instructions = "torch" if kernels is None else kernels.instructions
    if isinstance(spec, TransformersSpec):
        return f"{instructions}, on transformers' layers"
    return instructions
