"""Loads a draft model on a CPU: checks its vocabulary, reads its weights, makes its cache."""

from dataclasses import dataclass, replace

import msgspec

from legato.checkpoint.loader import open_checkpoint, resolve_dtype
from legato.checkpoint.source import ModelSource, configured_source, resolve_tokenizer
from legato.core.config import ModelConfig
from legato.core.errors import ConfigError
from legato.engine.build.blueprint import Blueprint
from legato.engine.build.cpu_model import load_cpu_model, make_attention
from legato.engine.build.kv_cache import configured_cache
from legato.executor.draft_model import DraftModel
from legato.executor.first_pass import check_forward
from legato.model.model import CacheSpec, Model
from legato.model.native_kernels import NativeKernels
from legato.model.native_support import why_not_native


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model without a cache. Attributes: blueprint: its own, as if it were the model."""

    blueprint: Blueprint
    model: Model
    cache: CacheSpec


def load_draft(blueprint: Blueprint, name: str, kernels: NativeKernels | None) -> LoadedDraft:
    """Load the draft model of that name; raises like `build_engine`.

    Args:
        kernels: the model's kernels, whose threads the draft model shares.
    """
    own = draft_blueprint(blueprint, name)
    if kernels is not None and why_not_native(own.checkpoint.spec, own.dtype, own.device):
        kernels = None
    model = load_cpu_model(own, kernels)
    return LoadedDraft(own, model, configured_cache(own, model.cache))


def draft_blueprint(blueprint: Blueprint, name: str) -> Blueprint:
    """Return the blueprint of the draft model of that name, whose weights are not read yet.

    Raises:
        ConfigError: it cannot draft for the model.
        UnsupportedModelError: Legato cannot run it.
    """
    config = _config(blueprint.config.model, name)
    checkpoint = open_checkpoint(config)
    vocab_size, own_size = blueprint.checkpoint.spec.vocab_size, checkpoint.spec.vocab_size
    if vocab_size != own_size:
        raise ConfigError(
            f"a draft model has the model's vocabulary, but {name} has {own_size:,} tokens, and "
            f"{blueprint.config.model.model} {vocab_size:,}"
        )
    if checkpoint.spec.states:
        raise ConfigError(f"{name} has recurrent layers, which a draft model cannot have")
    if not checkpoint.spec.cache(blueprint.dtype).has_one_geometry:
        raise ConfigError(
            f"{name} has layers that keep keys and values of different sizes, which those of a "
            "draft model cannot"
        )
    _check_tokens(blueprint.config.model, config)
    return replace(
        blueprint,
        config=msgspec.structs.replace(blueprint.config, model=config),
        checkpoint=checkpoint,
        dtype=resolve_dtype(config, checkpoint),
        max_model_len=min(blueprint.max_model_len, checkpoint.spec.max_model_len),
    )


def make_draft_model(draft: LoadedDraft, num_blocks: int) -> DraftModel:
    """Give it a cache of so many blocks, or fewer if those hold all running requests."""
    blueprint, config = draft.blueprint, draft.blueprint.config.cache
    num_blocks = min(num_blocks, blueprint.blocks_per_request * blueprint.max_num_seqs)
    attention = make_attention(draft.model, (draft.cache.whole,), (num_blocks,), config)
    check_forward(
        draft.model,
        attention,
        block_size=blueprint.block_size,
        vocab_size=blueprint.checkpoint.spec.vocab_size,
        max_len=blueprint.max_model_len,
        num_layers=blueprint.checkpoint.spec.num_layers,
    )
    return DraftModel(
        draft.model,
        attention,
        num_blocks=num_blocks,
        block_size=blueprint.block_size,
        vocab_size=blueprint.checkpoint.spec.vocab_size,
        max_len=blueprint.max_model_len,
    )


def _config(model: ModelConfig, name: str) -> ModelConfig:
    """Return the draft model's configuration: the model's, except for the checkpoint's fields."""
    config = msgspec.structs.replace(
        model,
        model=name,
        revision=None,
        tokenizer=None,
        max_model_len=None,
        speculative_model=None,
        model_impl="auto",
    )
    if config.quantization == "gguf" and not configured_source(config).is_gguf:
        return msgspec.structs.replace(config, quantization=None)
    return config


def _check_tokens(model: ModelConfig, draft: ModelConfig) -> None:
    """Raises `ConfigError` if a token id stands for different texts in the two models."""
    source, own = _tokenizer(model), configured_source(draft)
    if source == own or not (source.has_tokenizer and own.has_tokenizer):
        return
    # Local import: nothing else in this process needs a tokenizer.
    from legato.language.tokenizer.tokenizer import load_tokenizer

    ours, theirs = (load_tokenizer(one).vocabulary for one in (source, own))
    for token_id in range(min(ours.num_ids, theirs.num_ids)):
        token, other = ours.token_bytes(token_id), theirs.token_bytes(token_id)
        if token != other:
            raise ConfigError(
                f"a draft model has the model's vocabulary, but token {token_id} is {other!r} to "
                f"{draft.model}, and {token!r} to {model.model}"
            )


def _tokenizer(config: ModelConfig) -> ModelSource:
    if config.tokenizer is None:
        return configured_source(config)
    return resolve_tokenizer(config.tokenizer)
