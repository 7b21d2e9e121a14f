"""Puts an engine together from its configuration, resolving every "auto" to a number."""

import logging
from dataclasses import dataclass
from importlib.util import find_spec

import msgspec
import torch

from legato.checkpoint.base import Checkpoint
from legato.checkpoint.loader import open_checkpoint
from legato.core.config import EngineConfig, ModelConfig, SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.stats import CacheInfo
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.loop.grammars import Grammars
from legato.engine.process.messages import EngineInfo, TransferAddress
from legato.engine.startup.host import host_machinery
from legato.engine.startup.machinery import Machinery, Wanted
from legato.engine.startup.parts import StartParts
from legato.engine.startup.step_times import known_steps, recalibration
from legato.engine.startup.transfers import cache_layout, make_transfers
from legato.engine.startup.wanted import wanted_of, within_model
from legato.model.spec import DecoderSpec
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_time import StepTimeModel
from legato.speculation.lookup import OwnTokens, RecentOutputs
from legato.transfer.protocol import Layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineParts(Machinery):
    """A loaded model with its cache, before anything is scheduled on it.

    Attributes:
        config: resolved.
        grammars: where the executor finds those of requests.
        rejected_kernels: as of `KernelChoice`.
    """

    config: EngineConfig
    checkpoint: Checkpoint
    max_model_len: int
    grammars: Grammars
    rejected_kernels: dict[str, str]

    @property
    def spec(self) -> DecoderSpec:
        return self.checkpoint.spec


def build_engine(config: EngineConfig) -> tuple[EngineLoop, EngineInfo]:
    """Load the model, size the cache, and tie them to a scheduler.

    Returns:
        The engine, and what a front end needs to know of it.

    Raises:
        ConfigError: settings that contradict each other, the model or the machine.
        UnsupportedModelError: a checkpoint that cannot be run.
    """
    start = StartParts()
    parts = load_parts(config, start)
    known = known_steps(parts)
    step_time = StepTimeModel(known.steps, parts.rows)
    scheduler = Scheduler(
        parts.config.scheduler,
        max_model_len=parts.max_model_len,
        kv=parts.kv,
        step_time=step_time,
        drafters=(OwnTokens(), RecentOutputs()),
        draft_model=parts.draft_model,
    )
    start.end("calibration")
    info = msgspec.structs.replace(_describe(parts), start_s=start.seconds)
    for name, value in info.settings.items():
        logger.debug("%s: %s", name, value)
    engine = EngineLoop(scheduler, parts.kv, parts.executor, grammars=parts.grammars)
    engine.untaken = parts.untaken
    if config.transfer.kv_role is not None:
        engine.transfers = make_transfers(config.transfer, parts.kv, parts.blocks, _layout(parts))
        address = TransferAddress(config.transfer.kv_transfer_host, engine.transfers.port)
        info = msgspec.structs.replace(info, transfer=address)
    if known.is_doubtful:
        engine.recalibration = recalibration(parts, step_time)
    return engine, info


def model_context(config: ModelConfig) -> int:
    """Longest prompt plus output in tokens, without loading the model.

    Raises:
        ConfigError: there is no such model, or it cannot have what is configured.
        UnsupportedModelError: a checkpoint that cannot be run.
    """
    return within_model(config.max_model_len, open_checkpoint(config).spec)


def load_parts(config: EngineConfig, start: StartParts | None = None) -> EngineParts:
    """Load the model and make its cache; raises as `build_engine`.

    Args:
        start: is told of each part of it.
    """
    grammars = Grammars(config.scheduler.max_waiting)
    wanted = wanted_of(config, grammars.__getitem__, start or StartParts())
    if config.model.num_threads is not None:
        torch.set_num_threads(config.model.num_threads)
    return EngineParts(
        **vars(_machinery(wanted)),
        config=wanted.config,
        checkpoint=wanted.checkpoint,
        max_model_len=wanted.max_model_len,
        grammars=grammars,
        rejected_kernels=wanted.kernels.rejected,
    )


def _machinery(wanted: Wanted) -> Machinery:
    is_on_cpu = wanted.device.type == "cpu"
    if not is_on_cpu and find_spec("triton") is None:
        raise ConfigError("a GPU needs Triton: install legato[gpu]")
    if wanted.config.model.tensor_parallel_size > 1:
        from legato.engine.startup.divided import divided_machinery

        return divided_machinery(wanted)
    if is_on_cpu:
        return host_machinery(wanted)
    if wanted.config.model.speculative_model is not None:
        raise ConfigError(
            "a draft model drafts on a CPU: --speculative-model does not go with a GPU, on which "
            "--speculative looks drafts up"
        )
    # Imported where there is a GPU alone: Triton is a large package, and may be missing elsewhere.
    from legato.engine.startup.gpu import gpu_machinery
    from legato.gpu.device import CudaDevice

    return gpu_machinery(wanted, CudaDevice(wanted.device))


def _layout(parts: EngineParts) -> Layout:
    return cache_layout(
        parts.checkpoint, parts.cache, block_size=parts.kv.block_size, kernels=parts.kernels
    )


def _describe(parts: EngineParts) -> EngineInfo:
    config, model, kv = parts.config, parts.model, parts.kv
    num_cache_tokens = kv.num_blocks * kv.block_size
    cache_bytes = num_cache_tokens * parts.cache.token_bytes
    return EngineInfo(
        model=config.model.model,
        served_model_names=(config.model.model,),
        max_model_len=parts.max_model_len,
        device=parts.model.device.type,
        vocab_size=parts.spec.vocab_size,
        cache=CacheInfo(
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            dtype=_name(parts.cache.kept_dtype),
            enable_prefix_caching=config.cache.enable_prefix_caching,
        ),
        slo_classes=config.scheduler.classes,
        rejected_kernels=parts.rejected_kernels,
        settings={
            "model": config.model.model,
            "dtype": _name(model.dtype),
            "device": str(model.device),
            "threads": str(torch.get_num_threads()),
            **_ranks(config.model.tensor_parallel_size),
            **_draft_model(config.model.speculative_model),
            "weights": config.model.quantization or "not quantized",
            "kernels": parts.kernels,
            "max model length": f"{parts.max_model_len:,} tokens",
            "KV cache": f"{kv.num_blocks:,} blocks, {num_cache_tokens:,} tokens, "
            f"{cache_bytes / 2**30:.2f} GiB, {_name(parts.cache.kept_dtype)}",
            "prefix caching": "on" if config.cache.enable_prefix_caching else "off",
            "policy": config.scheduler.policy,
            "chunked prefill": "on" if config.scheduler.enable_chunked_prefill else "off",
            "step budget": _step_budget(config.scheduler),
            "prefill order": f"{config.scheduler.prefill_order}",
            **{f"class {name}": str(slo) for name, slo in config.scheduler.classes.items()},
            "max running": f"{config.scheduler.max_num_seqs}",
            "steps in flight": f"{config.scheduler.num_steps_in_flight}",
            "speculation": f"{config.scheduler.speculative}",
        },
    )


def _ranks(num_ranks: int) -> dict[str, str]:
    return {"ranks": str(num_ranks)} if num_ranks > 1 else {}


def _draft_model(name: str | None) -> dict[str, str]:
    return {} if name is None else {"draft model": name}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _step_budget(config: SchedulerConfig) -> str:
    tokens = f"{config.max_num_batched_tokens:,} tokens"
    return f"what the SLOs allow, up to {tokens}" if config.promises_pace else tokens
