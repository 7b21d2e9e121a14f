"""The command line of `legato serve` that makes an engine of a configuration."""

import shlex
from collections.abc import Sequence
from typing import Any

import msgspec

from legato.core.config import EngineConfig, engine_parts
from legato.core.config_fields import Config, Field, fields_of, written
from legato.core.slo import SloClass


def serve_flags(config: EngineConfig) -> list[str]:
    """Flags for all that is not as it is by default."""
    flags: list[str] = []
    for name in engine_parts():
        part: Config = getattr(config, name)
        for field in fields_of(type(part)):
            value = getattr(part, field.name)
            if value != field.default:
                flags += _flags(field, value)
    return flags


def command_line(flags: Sequence[str]) -> str:
    """As one would type it."""
    return shlex.join(["legato", "serve", *flags])


def _flags(field: Field, value: Any) -> list[str]:
    match field.kind:
        case "switch":
            return [field.option if value else field.option.replace("--", "--no-", 1)]
        case "classes":
            return [part for item in value.items() for part in _flag(field, _slo_class(*item))]
    return _flag(field, written(field.kind, value))


def _flag(field: Field, text: str) -> list[str]:
    # Behind a space, it would be taken for a flag itself.
    return [f"{field.option}={text}"] if text.startswith("-") else [field.option, text]


def _slo_class(name: str, slo: SloClass) -> str:
    promises = msgspec.structs.asdict(slo).items()
    told = [
        f"{kind.removesuffix('_s')}={written('duration', seconds)}"
        for kind, seconds in promises
        if seconds is not None
    ]
    return f"{name}:{','.join(told)}"
