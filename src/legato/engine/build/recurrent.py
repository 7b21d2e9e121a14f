"""Models with recurrent layers: what an engine of them refuses, and the memory of their states."""

from collections.abc import Sequence

import torch

from legato.core.config import EngineConfig
from legato.core.errors import ConfigError
from legato.engine.build.blueprint import Blueprint
from legato.engine.build.kv_cache import no_memory
from legato.executor.cache_memory import raising_memory_error, take_memory
from legato.executor.state_cache import StateCache
from legato.kv.manager import KVCacheManager
from legato.kv.state_slots import StateSlots
from legato.model.model import CacheSpec
from legato.model.spec import DecoderSpec
from legato.model.states import StateShape
from legato.model.transformers_spec import TransformersSpec


def check_recurrent(
    config: EngineConfig, spec: DecoderSpec | TransformersSpec, device: torch.device
) -> None:
    """Check that the model can have what was asked for.

    Raises:
        ConfigError: it is not built for models with recurrent layers, or only for these.
    """
    if not spec.states:
        if config.cache.state_checkpoints is not None:
            raise ConfigError("--state-checkpoints: this model has no recurrent layers")
        return
    is_on_gpu = device.type != "cpu"
    refused = {
        "--swap-space on a GPU": is_on_gpu and bool(config.cache.swap_space_bytes),
        "--kv-role on a GPU": is_on_gpu and config.transfer.kv_role is not None,
    }
    for name, is_asked_for in refused.items():
        if is_asked_for:
            raise ConfigError(f"this model has recurrent layers, which do not go with {name}")


def make_state_cache(
    blueprint: Blueprint, shapes: Sequence[StateShape], num_slots: int
) -> StateCache | None:
    """Make the slots of the recurrent layers' states; None if the model has no such layers.

    In a cache of a given size, their memory is allocated now.

    Args:
        shapes: of each layer's state, or of a rank's part of it.

    Raises:
        ConfigError: there is not enough memory.
    """
    if not shapes:
        return None
    try:
        with raising_memory_error():
            states = StateCache(
                shapes, num_slots=num_slots, dtype=blueprint.dtype, device=blueprint.device
            )
    except MemoryError as error:
        raise no_memory(num_slots * blueprint.state_bytes) from error
    if blueprint.config.cache.kv_cache_memory_bytes is not None:
        for part in states.tensors:
            take_memory(part)
    return states


def request_costs(blueprint: Blueprint, cache: CacheSpec, kv: KVCacheManager) -> dict[str, str]:
    """Describe what a request costs; empty for models without recurrent layers."""
    if kv.states is None:
        return {}
    request_bytes = kv.states.slots_per_request * blueprint.state_bytes
    states = f"{kv.states.slots_per_request} x {blueprint.state_bytes:,} bytes"
    return {
        "recurrent states": f"{kv.states.num_requests:,} requests, "
        f"{kv.states.num_spare_slots:,} checkpoints{_spacing(blueprint, kv.states)}, "
        f"{kv.states.num_slots * blueprint.state_bytes / 2**30:.2f} GiB",
        "a request costs": f"{request_bytes:,} bytes of states ({states}), and "
        f"{cache.token_bytes:,} bytes a token",
    }


def _spacing(blueprint: Blueprint, states: StateSlots) -> str:
    if not blueprint.config.cache.enable_prefix_caching:
        return ""
    return f" (of long prompts, every {states.spacing:,} tokens)"
