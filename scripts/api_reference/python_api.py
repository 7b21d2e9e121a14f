"""The Python API: `LLM`, `AsyncLLM`, `SamplingParams`, and what they take, return and raise."""

import enum
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase

import legato
from legato.core import errors as input_errors
from legato.core import stats
from legato.core.config import engine_fields
from legato.core.outputs import RequestOutput
from legato.core.slo import ServiceParams
from legato.engine import errors as engine_errors
from scripts.api_reference import http_api
from scripts.api_reference.docstrings import parse
from scripts.api_reference.markdown import clause, code, items

_CLASSES = (legato.LLM, legato.AsyncLLM)
_HEAVY = {"PreTrainedTokenizerBase": PreTrainedTokenizerBase}
"""What annotations name and their modules import only where types are checked."""
_DEFAULT = re.compile(r" \(default: (.+)\)$")
_OF_THE_ENGINE: dict[type, str] = {
    RequestOutput: "`CompletionDelta` has what most programs need of it.",
}
"""Types whose fields their docstrings explain; value the words on the page."""
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
        "methods-of-LLM": partial(_members, legato.LLM),
        "methods-of-AsyncLLM": partial(_members, legato.AsyncLLM, legato.LLM),
        "SamplingParams": partial(
            _settings,
            legato.SamplingParams,
            http_api.shared_fields() - {"max_tokens", "logprobs", "structured_outputs"},
        ),
        "StructuredOutputs": partial(_settings, legato.StructuredOutputs),
        "types": _types,
        "errors": _errors,
    }


def _constructor() -> str:
    """Return the parameters, with their types and flags where a flag of their name has none."""
    flags = {field.name: field for field in engine_fields()}
    docs = (parse(legato.LLM.__doc__), parse(legato.LLM.__init__.__doc__))
    words = docs[0].words("Args") | docs[1].words("Args")
    lines = []
    for parameter in inspect.signature(legato.LLM).parameters.values():
        field = flags.get(parameter.name)
        if field is None or field.flag.behind is not None:
            says = _without_default(clause(words[parameter.name]), parameter.default)
        else:
            says = field.option if _as_flag(parameter.name) != field.option else ""
        told = _parameter(parameter) if says else f"{parameter.name}={parameter.default!r}"
        lines.append(f"    {told}{f'  # {says}' if says else ''}")
    return "\n".join(lines)


def _as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _members(cls: type, model: type | None = None) -> str:
    """Return the methods and properties of a class.

    Args:
        model: a class that is described already; its members and parameters are named alone.
    """
    told = {} if model is None else _bodies(model)
    pieces, names = [], []
    for name, body in _bodies(cls).items():
        if told.get(name) == body:
            names.append(code(_call(cls, name)))
        else:
            like = model if name in told else None
            pieces.append(f"### {cls.__name__}.{name}\n{_member(cls, name, like)}")
    if names:
        pieces.append(f"As of `LLM`: {', '.join(names)}.")
    return "\n\n".join(pieces)


def _bodies(cls: type) -> dict[str, str]:
    return {name: parse(_function(cls, name).__doc__).body for name in _public(cls)}


def _member(cls: type, name: str, model: type | None) -> str:
    """Args: model: a class whose member of this name is described already."""
    function = _function(cls, name)
    doc = parse(function.__doc__)
    told = {} if model is None else parse(_function(model, name).__doc__).words("Args")
    shared = {one for one, words in doc.words("Args").items() if told.get(one) == words}
    if isinstance(vars(cls)[name], property):
        return f"    {name}: {_text(_hints_of(function)['return'])}\n\n{doc.body}"
    alike: dict[str, list[str]] = {}  # key the words
    for parameter, words in doc.words("Args").items():
        if parameter not in shared:
            alike.setdefault(clause(words), []).append(code(parameter))
    if shared and model is not None:
        alike[f"the other parameters of `{model.__name__}.{name}`"] = [code("...")]
    pieces = [
        f"    {_call(cls, name, shared)}",
        doc.body,
        items((", ".join(names), words) for words, names in alike.items()),
    ]
    return "\n\n".join(filter(None, pieces))


def _call(cls: type, name: str, shared: Set[str] = frozenset()) -> str:
    """Return a method's signature, or a property's name.

    Args:
        shared: parameters that three dots stand for.
    """
    function = _function(cls, name)
    if isinstance(vars(cls)[name], property):
        return name
    hints = _hints_of(function)
    parameters = inspect.signature(getattr(cls, name)).parameters.values()
    own = [p for p in parameters if p.name not in {"self", *shared}]
    told = [p.replace(annotation=hints[p.name]) for p in own]
    marked = [
        *(_parameter(p) for p in told if not _by_name(p)),
        *(["*"] if any(map(_by_name, told)) else []),
        *(_parameter(p) for p in told if _by_name(p)),
        *(["..."] if shared else []),
    ]
    kind = "await " if inspect.iscoroutinefunction(function) else ""
    return f"{kind}{name}({', '.join(marked)}) -> {_text(hints['return'])}"


def _by_name(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.KEYWORD_ONLY


def _parameter(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return f"{parameter.name}: {_text(parameter.annotation)}"
    return _setting(parameter.name, parameter.annotation, parameter.default)


def _setting(name: str, hint: Any, default: Any) -> str:
    """Return a name with its type and default; None as a default is no type of its own."""
    kind = _text(hint)
    return f"{name}: {kind.removesuffix('|None') if default is None else kind} = {default!r}"


def _without_default(words: str, default: Any) -> str:
    """Words that do not say again what the value is."""
    said = _DEFAULT.search(words)
    is_plain = said is not None and (isinstance(default, bool) or said[1] == str(default))
    return words[: said.start()] if said is not None and is_plain else words


def _types() -> str:
    described: dict[tuple[str, str], str] = {}  # key an attribute and its words, value its class
    return "\n\n".join(
        f"### {cls.__name__}\n{_description(cls, described)}" for cls in _reachable()
    )


def _description(cls: type, described: dict[tuple[str, str], str]) -> str:
    body = parse(cls.__doc__).body
    if issubclass(cls, enum.Enum):
        return f"{body} {', '.join(code(repr(member.value)) for member in cls)}."
    if cls is ServiceParams:
        return f"{body}\n\n{_settings(cls, http_api.shared_fields())}"
    return f"{body}\n\n{_attributes(cls, described)}"


def _attributes(cls: type, described: dict[tuple[str, str], str]) -> str:
    """Args: described: attributes that need no words any more; those of the class are added."""
    if cls in _OF_THE_ENGINE or cls.__module__ == stats.__name__:
        names = ", ".join(map(code, _hints(cls)))
        return f"{names}. {_OF_THE_ENGINE.get(cls, 'The [metrics](metrics.md) explain them.')}"
    words: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        words |= parse(vars(base).get("__doc__")).words("Attributes")
    rows: dict[str, str] = {}
    shared: dict[str, list[str]] = {}  # key the class that explains them
    for name, hint in _hints(cls).items():
        row = code(f"{name}: {_text(hint)}"), clause(words.get(name, ""))
        first = described.setdefault(row, cls.__name__)
        if first == cls.__name__ or not row[1]:
            rows[row[0]] = row[1]
        else:
            shared.setdefault(first, []).append(code(name))
    rows |= {f"As of `{first}`": ", ".join(names) for first, names in shared.items()}
    return items(rows.items())


def _settings(cls: type[msgspec.Struct], told: Set[str] = frozenset()) -> str:
    """Return the fields with their types and defaults.

    Args:
        told: fields that the HTTP API's lists explain.
    """
    hints, words = _hints(cls), parse(cls.__doc__).words("Attributes")
    fields = {field.name: field.default for field in msgspec.structs.fields(cls)}
    rows = [
        (code(_setting(name, hints[name], default)), clause(words[name]))
        for name, default in fields.items()
        if name not in told
    ]
    shared = ", ".join(code(f"{name}={fields[name]!r}") for name in fields if name in told)
    if shared:
        rows.append(("As of [HTTP requests](http.md#fields-of-every-generation)", shared))
    return items(rows)


def _hints_of(function: Any) -> dict[str, Any]:
    return typing.get_type_hints(function, localns=_HEAVY)


def _hints(cls: type) -> dict[str, Any]:
    """Types of the attributes; the docstring tells them where the class does not."""
    entries = parse(cls.__doc__).entries("Attributes")
    module = vars(sys.modules[cls.__module__])
    told = {name: eval(entry.type, module) for name, entry in entries.items() if entry.type}
    return typing.get_type_hints(cls) | told


def _errors() -> str:
    """Those of Legato's that any docstring of the public classes names."""
    public: list[Any] = [*_CLASSES, legato.SamplingParams, legato.StructuredOutputs]
    public += [_function(cls, name) for cls in _CLASSES for name in _public(cls)]
    raised = {name for thing in public for name in parse(thing.__doc__).words("Raises")}
    rows = []
    for module in (input_errors, engine_errors):
        for name, error in vars(module).items():
            if name in raised:
                doc = parse(error.__doc__)
                says = [
                    doc.body,
                    *(f"`{n}`: {words}" for n, words in doc.words("Attributes").items()),
                ]
                rows.append((code(f"{module.__name__}.{name}"), " ".join(says)))
    return items(rows)


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
        return "|".join(map(repr, arguments))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return "|".join(map(_text, arguments))
    if arguments:
        return f"{hint.__name__}[{', '.join(map(_text, arguments))}]"
    return str(hint.__name__)
