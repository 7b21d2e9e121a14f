"""What a configuration asks for, on this machine and of this model."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from legato.checkpoint.loader import open_checkpoint, resolve_dtype
from legato.core.config import EngineConfig, Kernels
from legato.core.errors import ConfigError
from legato.engine.startup.machinery import Wanted
from legato.engine.startup.parts import StartParts
from legato.executor.kernel_check import choose_kernels
from legato.grammar.compiled import Grammar
from legato.model.native import native_instructions
from legato.model.spec import DecoderSpec


def wanted_of(
    config: EngineConfig, grammar: Callable[[str], Grammar] | None, start: StartParts
) -> Wanted:
    """Find the model, and replace "auto" by what it stands for.

    Raises:
        ConfigError: settings that contradict each other, the model or the machine.
        UnsupportedModelError: a checkpoint that cannot be run.
    """
    device = resolve_device(config.model.device)
    with ThreadPoolExecutor(1) as thread:
        kernels = thread.submit(choose_kernels, _native_candidates(config.model.kernels, device))
        checkpoint = open_checkpoint(config.model)
    max_model_len = within_model(config.model.max_model_len, checkpoint.spec)
    scheduler = config.scheduler.resolve(max_model_len, device.type)
    return Wanted(
        msgspec.structs.replace(config, scheduler=scheduler),
        checkpoint,
        resolve_dtype(config.model, checkpoint),
        device,
        max_model_len,
        kernels.result(),
        grammar,
        start,
    )


def _native_candidates(asked: Kernels, device: torch.device) -> list[str]:
    """Sets of instructions whose kernels the model may run on, the best first."""
    if device.type != "cpu":
        return []
    return [name for name in native_instructions() if asked in ("auto", name)]


def within_model(max_model_len: int | None, spec: DecoderSpec) -> int:
    """Longest prompt plus output, the model's own for None; raises `ConfigError`: it has less."""
    if max_model_len is None:
        return spec.max_model_len
    if not 1 < max_model_len <= spec.max_model_len:
        raise ConfigError(
            f"max_model_len must be in [2, {spec.max_model_len}] for this model, "
            f"got {max_model_len}"
        )
    return max_model_len


def resolve_device(wanted: str) -> torch.device:
    """What "auto" stands for here; raises `ConfigError` where there is no such device."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch sees no CUDA device")
    return torch.device(wanted)
