"""Turns a configuration into the command line of `legato serve`."""

import shlex
from collections.abc import Sequence
from typing import Any

from legato.core.config import EngineConfig, engine_parts
from legato.core.config_fields import Config, Field, fields_of, written
from legato.core.slo import P99, SloClass, percentile


def serve_flags(config: EngineConfig) -> list[str]:
    """Return flags for all settings that differ from their defaults.

    --itl-slo is always among them: a server's default is not the configuration's.
    """
    return [flag for name in engine_parts() for flag in part_flags(getattr(config, name))]


def part_flags(part: Config) -> list[str]:
    """Return flags for the settings of one part that differ from their defaults."""
    flags: list[str] = []
    for field in fields_of(type(part)):
        value, behind = getattr(part, field.name), _behind(part, field)
        if (value != field.default or behind) and field.flag.behind is None:
            flags += _flags(field, value, behind)
    return flags


def command_line(flags: Sequence[str]) -> str:
    """Return the command line as a user would type it."""
    return shlex.join(["legato", "serve", *flags])


def _behind(part: Config, field: Field) -> str:
    """Return the text that is typed after a field's value, or in its place."""
    behind = {
        o.name: getattr(part, o.name) for o in fields_of(type(part)) if o.flag.behind == field.name
    }
    bounds_gaps = behind.pop("bounds_gaps", None)
    if bounds_gaps is not None and getattr(part, field.name) is None:
        return "auto" if bounds_gaps else "off"
    return "".join(map(_quantile, behind.values()))


def _quantile(quantile: float) -> str:
    return "" if quantile == P99 else f":{percentile(quantile)}"


def _flags(field: Field, value: Any, behind: str) -> list[str]:
    match field.kind:
        case "switch":
            return [field.option if value else field.option.replace("--", "--no-", 1)]
        case "classes":
            return [part for item in value.items() for part in _flag(field, _slo_class(*item))]
    return _flag(field, ("" if value is None else written(field.kind, value)) + behind)


def _flag(field: Field, text: str) -> list[str]:
    # After a space, it would be read as a flag.
    return [f"{field.option}={text}"] if text.startswith("-") else [field.option, text]


def _slo_class(name: str, slo: SloClass) -> str:
    promises = {
        "itl": (slo.itl_s, _quantile(slo.itl_quantile)),
        "tpot": (slo.tpot_s, ""),
        "ttft": (slo.ttft_s, ""),
    }
    told = [
        f"{kind}={written('duration', seconds)}{behind}"
        for kind, (seconds, behind) in promises.items()
        if seconds is not None
    ]
    return f"{name}:{','.join(told)}"
