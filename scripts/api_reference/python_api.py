"""The Python API: `LLM`, `AsyncLLM`, `SamplingParams`, and what they take, return and raise."""

import enum
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase

import legato
from legato.core import errors as input_errors
from legato.engine import errors as engine_errors
from scripts.api_reference.docstrings import parse
from scripts.api_reference.markdown import clause, code, table

_CLASSES = (legato.LLM, legato.AsyncLLM)
_HEAVY = {"PreTrainedTokenizerBase": PreTrainedTokenizerBase}
"""What annotations name and their modules import only where types are checked."""
_DEFAULT = re.compile(r" \(default: (.+)\)$")
_TOLD_ELSEWHERE = frozenset(
    {
        "legato.core.cache_config",
        "legato.core.config",
        "legato.core.sampling_params",
        "legato.core.structured_outputs",
    }
)
"""Modules of types that have a place of their own on the page."""


def parts() -> Mapping[str, Callable[[], str]]:
    """Key a part of the page; value writes it."""
    return {
        "LLM": _constructor,
        **{
            f"{cls.__name__}.{name}": partial(_member, cls, name)
            for cls in _CLASSES
            for name in _public(cls)
        },
        "SamplingParams": partial(_settings, legato.SamplingParams),
        "StructuredOutputs": partial(_settings, legato.StructuredOutputs),
        "types": _types,
        "errors": _errors,
    }


def _constructor() -> str:
    docs = (parse(legato.LLM.__doc__), parse(legato.LLM.__init__.__doc__))
    return _parameters(inspect.signature(legato.LLM), docs[0].words("Args") | docs[1].words("Args"))


def _member(cls: type, name: str) -> str:
    function = _function(cls, name)
    doc = parse(function.__doc__)
    hints = typing.get_type_hints(function, localns=_HEAVY)
    if isinstance(vars(cls)[name], property):
        return f"A property, {code(_text(hints['return']))}. {doc.body}"
    signature = inspect.signature(getattr(cls, name))
    told = [p for p in signature.parameters.values() if p.name != "self"]
    plain = inspect.Signature([p.replace(annotation=p.empty) for p in told])
    typed = inspect.Signature([p.replace(annotation=hints[p.name]) for p in told])
    kind = "await " if inspect.iscoroutinefunction(function) else ""
    pieces = [
        f"    {kind}{name}{plain} -> {_text(hints['return'])}",
        doc.body,
        _parameters(typed, doc.words("Args")),
    ]
    return "\n\n".join(filter(None, pieces))


def _parameters(signature: inspect.Signature, words: Mapping[str, str]) -> str:
    rows = [
        (
            code(p.name),
            code(_text(p.annotation)),
            "" if p.default is p.empty else code(repr(p.default)),
            _without_default(clause(words.get(p.name, "")), p.default),
        )
        for p in signature.parameters.values()
    ]
    return table(("parameter", "type", "default", ""), rows)


def _without_default(words: str, default: Any) -> str:
    """Words that do not say again what the value is."""
    said = _DEFAULT.search(words)
    is_plain = said is not None and (isinstance(default, bool) or said[1] == str(default))
    return words[: said.start()] if said is not None and is_plain else words


def _types() -> str:
    return "\n\n".join(f"### {cls.__name__}\n{_description(cls)}" for cls in _reachable())


def _description(cls: type) -> str:
    body = parse(cls.__doc__).body
    if issubclass(cls, enum.Enum):
        return f"{body} {', '.join(code(repr(member.value)) for member in cls)}."
    return f"{body}\n\n{_attributes(cls)}"


def _attributes(cls: type) -> str:
    words: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        words |= parse(vars(base).get("__doc__")).words("Attributes")
    rows = [
        (code(name), code(_text(hint)), clause(words.get(name, "")))
        for name, hint in _hints(cls).items()
    ]
    return table(("attribute", "type", ""), rows)


def _settings(cls: type[msgspec.Struct]) -> str:
    """As `_attributes`, with what they are where they are not given."""
    hints, words = _hints(cls), parse(cls.__doc__).words("Attributes")
    rows = [
        (
            code(field.name),
            code(_text(hints[field.name])),
            code(repr(field.default)),
            clause(words[field.name]),
        )
        for field in msgspec.structs.fields(cls)
    ]
    return table(("field", "type", "default", ""), rows)


def _hints(cls: type) -> dict[str, Any]:
    """Types of the attributes; the docstring tells them where the class does not."""
    entries = parse(cls.__doc__).entries("Attributes")
    module = vars(sys.modules[cls.__module__])
    told = {name: eval(entry.type, module) for name, entry in entries.items() if entry.type}
    return typing.get_type_hints(cls) | told


def _errors() -> str:
    """Those of Legato's that any docstring of the public classes names."""
    raised: dict[str, list[str]] = {}  # key the error's name, value where it may be raised
    public: dict[str, Any] = {}
    for cls in _CLASSES:
        public[cls.__name__] = cls
        public |= {f"{cls.__name__}.{name}": _function(cls, name) for name in _public(cls)}
    public |= {cls.__name__: cls for cls in (legato.SamplingParams, legato.StructuredOutputs)}
    for place, thing in public.items():
        for name in parse(thing.__doc__).words("Raises"):
            raised.setdefault(name, []).append(code(place))
    rows = []
    for module in (input_errors, engine_errors):
        for name, error in vars(module).items():
            if name in raised:
                doc = parse(error.__doc__)
                says = [
                    doc.body,
                    *(f"`{n}`: {words}" for n, words in doc.words("Attributes").items()),
                ]
                rows.append(
                    (code(f"{module.__name__}.{name}"), ", ".join(raised[name]), " ".join(says))
                )
    return table(("error", "raised by", ""), rows)


def _public(cls: type) -> list[str]:
    return [name for name in vars(cls) if not name.startswith("_")]


def _function(cls: type, name: str) -> Any:
    member = vars(cls)[name]
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


def _reachable() -> list[type]:
    """Classes in the annotations of the public ones, in those of these classes, and so on."""
    found: dict[type, None] = {}
    for parameter in inspect.signature(legato.LLM).parameters.values():
        _collect(parameter.annotation, found)
    for cls in _CLASSES:
        for name in sorted(_public(cls), key=lambda name: isinstance(vars(cls)[name], property)):
            for hint in typing.get_type_hints(_function(cls, name), localns=_HEAVY).values():
                _collect(hint, found)
    return [cls for cls in found if cls not in _CLASSES]


def _collect(hint: Any, found: dict[type, None]) -> None:
    for argument in typing.get_args(hint):
        _collect(argument, found)
    is_ours = inspect.isclass(hint) and hint.__module__.startswith("legato.")
    if is_ours and hint not in found and hint.__module__ not in _TOLD_ELSEWHERE:
        found[hint] = None
        for field in _hints(hint).values():
            _collect(field, found)


def _text(hint: Any) -> str:
    """A type as one would write it, without modules."""
    arguments = typing.get_args(hint)
    if hint is types.NoneType:
        return "None"
    if hint is ...:
        return "..."
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(repr, arguments))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(map(_text, arguments))
    if arguments:
        return f"{hint.__name__}[{', '.join(map(_text, arguments))}]"
    return str(hint.__name__)
