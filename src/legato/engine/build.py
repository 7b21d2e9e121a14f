"""Puts an engine together from its configuration, resolving every "auto" to a number."""

import logging

import msgspec
import torch

from legato.core.config import EngineConfig
from legato.core.errors import ConfigError
from legato.engine.core import EngineCore
from legato.engine.messages import EngineInfo
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.memory import num_cache_blocks
from legato.executor.torch_executor import TorchExecutor
from legato.kv.manager import KVCacheManager
from legato.model.decoder import Decoder
from legato.model.defaults import ModelDefaults, load_defaults
from legato.model.loader import load_decoder, open_checkpoint, resolve_dtype
from legato.model.source import resolve_source
from legato.model.spec import DecoderSpec
from legato.model.tokenizer import Tokenizer, load_tokenizer
from legato.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig) -> tuple[EngineCore, EngineInfo, Tokenizer]:
    """Load the model, size the cache, and tie them to a scheduler.

    Returns:
        The engine, what a front end needs to know of it, and the model's tokenizer.

    Raises:
        ConfigError: settings that contradict each other, the model or the machine.
        UnsupportedModelError: a checkpoint that cannot be run.
    """
    checkpoint = open_checkpoint(config.model)
    max_model_len = _max_model_len(config.model.max_model_len, checkpoint.spec)
    scheduler_config = config.scheduler.resolve(max_model_len)
    device = _device(config.model.device)
    if config.model.num_threads is not None:
        torch.set_num_threads(config.model.num_threads)
    decoder = load_decoder(checkpoint, dtype=resolve_dtype(config.model, checkpoint), device=device)
    num_blocks = num_cache_blocks(
        config.cache,
        bytes_per_block=_bytes_per_block(decoder, config.cache.block_size),
        blocks_per_request=-(-max_model_len // config.cache.block_size),
        max_num_seqs=scheduler_config.max_num_seqs,
        device=device,
    )
    resolved = msgspec.structs.replace(config, scheduler=scheduler_config)
    kv = KVCacheManager(num_blocks, config.cache.block_size)
    scheduler = Scheduler(scheduler_config, max_model_len=max_model_len, kv=kv)
    attention = TorchAttentionBackend.for_decoder(
        decoder, num_blocks=kv.num_blocks, block_size=kv.block_size
    )
    executor = TorchExecutor(decoder, attention, kv.block_size)
    source = resolve_source(config.model.model, config.model.revision)
    tokenizer = load_tokenizer(source)
    info = _describe(
        resolved,
        decoder,
        load_defaults(source, tokenizer.eos_token_id),
        max_model_len=max_model_len,
        num_blocks=num_blocks,
    )
    for name, value in info.settings.items():
        logger.debug("%s: %s", name, value)
    return EngineCore(scheduler, kv, executor), info, tokenizer


def _max_model_len(wanted: int | None, spec: DecoderSpec) -> int:
    if wanted is None:
        return spec.max_model_len
    if not 1 < wanted <= spec.max_model_len:
        raise ConfigError(
            f"max_model_len must be in [2, {spec.max_model_len}] for this model, got {wanted}"
        )
    return wanted


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch sees no CUDA device")
    return torch.device(wanted)


def _bytes_per_block(decoder: Decoder, block_size: int) -> int:
    spec = decoder.spec
    values = 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim
    return values * decoder.dtype.itemsize


def _describe(
    config: EngineConfig,
    decoder: Decoder,
    defaults: ModelDefaults,
    *,
    max_model_len: int,
    num_blocks: int,
) -> EngineInfo:
    num_cache_tokens = num_blocks * config.cache.block_size
    cache_bytes = num_blocks * _bytes_per_block(decoder, config.cache.block_size)
    return EngineInfo(
        model=config.model.model,
        served_model_name=config.model.model,
        max_model_len=max_model_len,
        vocab_size=decoder.spec.vocab_size,
        eos_token_ids=defaults.eos_token_ids,
        default_sampling=defaults.sampling,
        settings={
            "model": config.model.model,
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "device": str(decoder.device),
            "threads": str(torch.get_num_threads()),
            "max model length": f"{max_model_len:,} tokens",
            "KV cache": f"{num_blocks:,} blocks, {num_cache_tokens:,} tokens, "
            f"{cache_bytes / 2**30:.2f} GiB",
            "policy": config.scheduler.policy,
            "chunked prefill": "on" if config.scheduler.enable_chunked_prefill else "off",
            "step budget": f"{config.scheduler.max_num_batched_tokens:,} tokens",
            "max running": f"{config.scheduler.max_num_seqs}",
        },
    )
