"""Builds the runtime of a model on a CPU: native layers if they can run, else PyTorch's."""

from legato.core.cache_config import CacheConfig
from legato.engine.build.blueprint import Blueprint
from legato.engine.build.cpu_model import (
    check_steps_in_flight,
    cpu_rows,
    load_cpu_model,
    make_attention,
    native_kernels,
    untaken_pages,
)
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
from legato.kv.manager import KVCacheManager
from legato.model.model import CacheSpec
from legato.model.native_kernels import NativeKernels
from legato.model.spec import DecoderSpec
from legato.model.transformers_spec import TransformersSpec


def cpu_runtime(blueprint: Blueprint) -> ModelRuntime:
    """Load the model and make its cache; raises like `build_engine`."""
    config, timer, spec = blueprint.config, blueprint.timer, blueprint.checkpoint.spec
    check_steps_in_flight(config)
    kernels = native_kernels(blueprint)
    timer.end("description")
    model = load_cpu_model(blueprint, kernels)
    timer.end("weights")
    cache = configured_cache(blueprint, model.cache)
    draft = _load_draft(blueprint, kernels)
    groups = cache.groups(blueprint.max_model_len)
    kv = make_kv_manager(blueprint, groups, _cache_bytes(config.cache, cache, draft))
    attention = make_attention(model, groups, kv.group_sizes, config.cache)
    states = make_state_cache(blueprint, spec.states, kv.num_states)
    timer.end("cache")
    check_forward(
        model,
        attention,
        block_size=kv.block_size,
        vocab_size=spec.vocab_size,
        max_len=blueprint.max_model_len,
        num_layers=spec.num_layers,
        states=states,
    )
    timer.end("first pass")
    executor = TorchExecutor(
        model,
        attention,
        kv.block_size,
        host_cache=_host_cache(attention, kv, states),
        grammar=blueprint.grammar,
        states=states,
        score_head=blueprint.score_head,
    )
    return ModelRuntime(
        blueprint=blueprint,
        model=model,
        cache=cache,
        kv=kv,
        executor=executor,
        groups=groups,
        blocks=attention.blocks,
        states=() if states is None else states.tensors,
        rows=cpu_rows(spec, model),
        kernels=_kernels(spec, kernels),
        untaken=untaken_pages(config.cache, attention, states),
        draft_model=_draft_model(blueprint, draft, kv.num_blocks),
    )


def _kernels(spec: DecoderSpec | TransformersSpec, kernels: NativeKernels | None) -> str:
    """Return what computes the layers, in words."""
    instructions = "torch" if kernels is None else kernels.instructions
    if isinstance(spec, TransformersSpec):
        return f"{instructions}, on transformers' layers"
    return instructions


def _host_cache(
    attention: AttentionBackend, kv: KVCacheManager, states: StateCache | None
) -> HostCache:
    return HostCache(attention.blocks, kv.host_sizes, states=states, num_states=kv.num_host_states)


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
