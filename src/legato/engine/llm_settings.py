"""The keywords of `LLM`: the fields of an engine's configuration, by their own names."""

import inspect
import textwrap
from typing import Any

import msgspec

from legato.core.config import EngineConfig, engine_fields
from legato.core.config_fields import Field

_DEFAULTS: dict[str, Any] = {"max_waiting": 2**31}  # the caller waits for all of them anyway
"""Where they are not the fields' own; key the field's name."""


def llm_config(**settings: Any) -> EngineConfig:
    """The engine that the keywords describe; raises as `EngineConfig.of`."""
    return EngineConfig.of(**{**_DEFAULTS, **settings})


def llm_signature() -> inspect.Signature:
    """Of `LLM.__init__`: the model first, all others by keyword."""
    model, *others = _fields()
    return inspect.Signature(
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
            _parameter(model, inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(_parameter(field, inspect.Parameter.KEYWORD_ONLY) for field in others),
        ]
    )


def llm_docstring() -> str:
    """What each keyword means."""
    told = (f"{field.name}: {field.description}." for field in _fields())
    lines = [
        line
        for text in told
        for line in textwrap.wrap(text, 96, initial_indent=" " * 4, subsequent_indent=" " * 8)
    ]
    return "\n".join(["Load the model.", "", "Args:", *lines])


def _fields() -> list[Field]:
    return [
        msgspec.structs.replace(field, default=_DEFAULTS.get(field.name, field.default))
        for field in engine_fields()
    ]


def _parameter(field: Field, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(field.name, kind, default=field.default, annotation=field.type)
