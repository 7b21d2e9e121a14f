"""The command line of `legato serve` that makes an engine of a configuration."""

import shlex
from collections.abc import Sequence
from typing import Any

import msgspec

from legato.core.config import EngineConfig

_FLAGS = {
    "kv_cache_memory_bytes": "--kv-cache-memory",
    "memory_utilization": "--gpu-memory-utilization",
    "itl_slo_s": "--itl-slo",
    "tpot_slo_s": "--tpot-slo",
    "ttft_slo_s": "--ttft-slo",
}
"""Key a field of the configuration; others are named as they are."""


def serve_flags(config: EngineConfig) -> list[str]:
    """Flags for all that is not as it is by default."""
    flags: list[str] = []
    for part in (config.model, config.cache, config.scheduler, config.calibration):
        default = type(part)()
        for name in part.__struct_fields__:
            value = getattr(part, name)
            if value != getattr(default, name):
                flags += _flags(name, value)
    return flags


def command_line(flags: Sequence[str]) -> str:
    """As one would type it."""
    return shlex.join(["legato", "serve", *flags])


def _flags(name: str, value: Any) -> list[str]:
    flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
    if name == "slo_classes":
        return [part for item in value.items() for part in ("--slo-class", _class(*item))]
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, f"{value:g}" if isinstance(value, float) else str(value)]


def _class(name: str, slo: msgspec.Struct) -> str:
    promises = msgspec.structs.asdict(slo).items()
    told = [f"{kind[:-2]}={seconds:g}" for kind, seconds in promises if seconds is not None]
    return f"{name}:{','.join(told)}"
