"""The keywords of `LLM` and `AsyncLLM`: fields of configurations and of conversations, by name."""

import inspect
import textwrap
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from legato.core.cache_config import TransferConfig
from legato.core.config import EngineConfig, engine_fields
from legato.core.config_fields import Config, Field, Flag, fields_of
from legato.language.conversation.template import ConversationOptions

OFFLINE: Mapping[str, Any] = {"max_waiting": 2**31}  # the caller waits for all requests anyway
"""Defaults of `LLM` that differ from the fields'; key the field's name."""
_AnyChat = TypeVar("_AnyChat", bound=Callable[..., Any])
_OPTIONS_LINE = "            options: fields of `ConversationOptions`.\n"
_OF_SERVERS = frozenset(TransferConfig.__struct_fields__)
"""Fields for engines that other engines can reach."""


class TextConfig(Config, frozen=True, kw_only=True):
    """Settings of the text side in the caller's process."""

    flag_group = "model"

    skip_tokenizer_init: Annotated[
        bool, Flag("load no tokenizer: prompts are token ids then, and outputs have no text")
    ] = False


def llm_config(
    defaults: Mapping[str, Any] = OFFLINE, **settings: Any
) -> tuple[EngineConfig, TextConfig]:
    """Make the configurations from keywords; raises as `EngineConfig.of`."""
    for name in _OF_SERVERS & settings.keys():
        raise TypeError(f"{name} is a setting of servers")
    names = TextConfig.__struct_fields__
    text = TextConfig(**{name: settings.pop(name) for name in names if name in settings})
    return EngineConfig.of(**{**defaults, **settings}), text


def llm_signature(defaults: Mapping[str, Any] = OFFLINE) -> inspect.Signature:
    """Return the signature of `__init__`: the model first, all others by keyword."""
    model, *others = _fields(defaults)
    return inspect.Signature(
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
            _parameter(model, inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(_parameter(field, inspect.Parameter.KEYWORD_ONLY) for field in others),
        ]
    )


def llm_docstring(defaults: Mapping[str, Any] = OFFLINE) -> str:
    """Return the docstring of `__init__`, with each keyword's meaning."""
    told = (f"{field.name}: {field.description}." for field in _fields(defaults))
    lines = [
        line
        for text in told
        for line in textwrap.wrap(text, 96, initial_indent=" " * 4, subsequent_indent=" " * 8)
    ]
    return "\n".join(["Load the model.", "", "Args:", *lines])


def takes_conversation_options(chat: _AnyChat) -> _AnyChat:
    """Put the keywords of `**options`, with their meanings, into signature and docstring."""
    signature = inspect.signature(chat)
    types = typing.get_type_hints(ConversationOptions)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=types[field.name],
        )
        for field in msgspec.structs.fields(ConversationOptions)
    ]
    *others, several = signature.parameters.values()
    _, _, meanings = inspect.cleandoc(ConversationOptions.__doc__ or "").partition("Attributes:\n")
    doc = chat.__doc__ or ""
    assert _OPTIONS_LINE in doc, "it says where the options stand"
    told = textwrap.indent(textwrap.dedent(meanings), " " * 12)
    chat.__doc__ = doc.replace(_OPTIONS_LINE, f"{told}\n")
    chat.__signature__ = signature.replace(parameters=[*others, *options])  # type: ignore[attr-defined]
    del chat.__annotations__[several.name]
    chat.__annotations__ |= types
    return chat


def _fields(defaults: Mapping[str, Any]) -> list[Field]:
    return [
        msgspec.structs.replace(field, default=defaults.get(field.name, field.default))
        for field in (*engine_fields(), *fields_of(TextConfig))
        if field.name not in _OF_SERVERS
    ]


def _parameter(field: Field, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(field.name, kind, default=field.default, annotation=field.type)
