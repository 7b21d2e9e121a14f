"""The HTTP API, as its OpenAPI document describes it."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import msgspec
from pydantic import BaseModel

from legato.api.bodies.body_model import ModelRequest
from legato.api.bodies.generation_options import (
    GenerationOptions,
    SamplingOptions,
    ServiceOptions,
)
from legato.api.openapi import field_words
from legato.core.sampling_params import SamplingParams
from scripts.api_reference.app_without_engine import openapi_document
from scripts.api_reference.json_types import Schema, references, skeleton, type_words
from scripts.api_reference.markdown import clause, code, items, uncapitalized
from scripts.api_reference.words import DEFINED_BY, ERRORS, ORIGINS

_GENERATION = ("ChatRequest", "CompletionRequest")
_SERVICE = "service"
_SAMPLING = "sampling"
_EVERY = "every generation"
"""Fields that each body has that asks for generated tokens, beside the two above."""
_COMPLETIONS = "all completions"
"""Fields that both kinds of completions have beside these."""
_SHARED = (_SERVICE, _SAMPLING, _EVERY, _COMPLETIONS)
_OBJECTS = {
    "objects-of-chats": (*("ChatMessage", "FunctionDefinition"),),
    "objects-of-completions": (*("ResponseFormat", "JsonSchemaFormat", "StreamOptions"),),
    "objects-of-responses": (
        *("FunctionTool", "CustomTool", "NamespaceTool"),
        "TextFormat",
    ),
    "objects-of-messages": (
        *("AnthropicMessage", "AnthropicTool", "AnthropicToolChoice", "Thinking"),
        *("ContextManagement", "ClearThinking", "ClearToolUses"),
    ),
    "objects-of-ollama": ("OllamaMessage", "OllamaOptions"),
    "objects-of-generate": ("SentSamplingParams", "ParseContext"),
}
"""Key a part of the page; value the schemas that it lists."""
_UNLISTED = (
    *("MessageToolCall", "CalledFunction", "Tool", "TextOptions", "ReasoningOptions"),
    *("TextBlock", "OutputFormat", "OutputConfig", "Trigger", "KeptToolUses", "InputTokens"),
    *("InputFormat", "KVTransferRequest", "AnthropicMetadata", "ResponseStreamOptions"),
    *("ThinkingSwitch", "ReasoningSwitch", "ReportedUsage"),
)
"""Small schemas, shown where a field has them, and those without any field that has an effect."""
_UNLISTED_TAGS = ("trace", "settings")
"""Tags of endpoints for operators, whose few fields the page explains itself."""
_TOLD_FIRST = {
    _SERVICE: "[service](#service)",
    _SAMPLING: "[sampling](#sampling)",
    _EVERY: "[every generation](#fields-of-every-generation)",
    _COMPLETIONS: "[all completions](#fields-of-all-completions)",
    "ChatRequest": "[chats](#post-v1chatcompletions)",
    "EmbeddingRequest": "[embeddings](#post-v1embeddings)",
    "MessagesRequest": "[messages](#post-v1messages)",
    "FunctionTool": "[FunctionTool](#functiontool)",
}
"""Key a schema whose fields others share; value its place on the page."""
_NO_EFFECT = "changes nothing: "
_MOST_KINDS = 2
"""Types of a field that the page tells, after the first."""
_LINK = re.compile(r"\[(\w+)\]\(#\w+\)")
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


def parts() -> Mapping[str, Callable[[], str]]:
    """Key a part of the page; value writes it."""
    return {
        "endpoints": _endpoints,
        "errors": _errors,
        **{_place(name): partial(_fields, name) for name in (*_SHARED, *_bodies())},
        "origins": lambda: items((one, ", ".join(map(code, ORIGINS[one]))) for one in ORIGINS),
        **{part: partial(_objects, names) for part, names in _OBJECTS.items()},
        "parts-of-answers": _parts_of_answers,
        **{name: partial(_answer, name) for name in _answers()},
    }


def _place(title: str) -> str:
    return f"fields-of-{title.replace(' ', '-')}"


class DocumentedField(NamedTuple):
    """A field of a request's schema, as the reference describes it.

    Attributes:
        has_one_value: others are refused.
        words: the reference's words for it.
    """

    schema: str
    name: str
    has_one_value: bool
    words: str


def documented_fields() -> dict[str, DocumentedField]:
    """Return the fields of requests to models; key the schema's name and the field's."""
    return {
        f"{schema}.{name}": DocumentedField(
            schema, name, _has_one_value(described), _words(schema, name)
        )
        for schema, name, described in listed()
    }


def shared_fields() -> Set[str]:
    """Return the fields that the lists of service, sampling, generations and completions have."""
    return set(chain(*map(_own, _SHARED)))


def listed() -> Iterator[tuple[str, str, Schema]]:
    """Yield all fields of requests: the schema's name, the field's, and the field's schema."""
    for title in dict.fromkeys([*_bodies(), *chain(*_OBJECTS.values()), *_UNLISTED]):
        for name, schema in _properties(title).items():
            yield title, name, schema


def _has_one_value(schema: Schema) -> bool:
    kinds = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    return len(kinds) == 1 and ("const" in kinds[0] or len(kinds[0].get("enum", ())) == 1)


def _endpoints() -> str:
    """Return the endpoints by who defined them; those with one description share a line."""
    lines: dict[str, dict[str, list[str]]] = {}  # key who defined them, then the description
    for label, operation in _operations():
        (tag,) = operation["tags"]
        says = clause(operation["description"].split("\n")[0].removeprefix("Return "))
        says = uncapitalized(says)
        lines.setdefault(DEFINED_BY[tag], {}).setdefault(says, []).append(code(label))
    return "\n\n".join(
        f"{origin}:\n\n{items((', '.join(labels), says) for says, labels in of_one.items())}"
        for origin, of_one in lines.items()
    )


def _errors() -> str:
    """Return the statuses of errors, each with its codes."""
    described = {status for _, operation in _operations() for status in operation["responses"]}
    assert {str(status) for status in ERRORS} == described - {"200"}
    return items(
        (
            str(status),
            ", ".join(f"{code(name)} ({words})" if name else words for name, words in told.items()),
        )
        for status, told in ERRORS.items()
    )


def _objects(names: tuple[str, ...]) -> str:
    return "\n\n".join(f"### {name}\n{_fields(name)}" for name in names)


def _fields(title: str) -> str:
    """Return a list of a schema's fields: own ones, those without effect, those told elsewhere."""
    told: dict[str, list[str]] = {}  # key the schema that explains them
    for name, schema in _own(title).items():
        told.setdefault(_told_first(title, name, schema), []).append(name)
    own = told.pop(title, [])
    whole = [first for first, names in told.items() if len(names) == len(_own(first))]
    rest = {first: names for first, names in told.items() if first not in whole}
    idle = {
        name: _words(title, name).removeprefix(_NO_EFFECT)
        for name in chain(own, *rest.values())
        if _words(title, name).startswith(_NO_EFFECT)
    }
    rows = _own_rows(title, [name for name in own if name not in idle])
    rows.append(("No effect", ", ".join(code(name) + _advice(idle[name]) for name in idle)))
    rows.append(("All of", ", ".join(_TOLD_FIRST[first] for first in whole)))
    for first, names in rest.items():
        listed_ones = ", ".join(code(name) for name in names if name not in idle)
        rows.append((f"As of {_TOLD_FIRST[first]}", listed_ones))
    return items((thing, words) for thing, words in rows if words)


def _own_rows(title: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return fields with their words, required ones first and those with one value last."""
    required = _required(title)
    rows: dict[tuple[str, str], list[str]] = {}  # key type and words
    fixed: list[str] = []
    for name in sorted(names, key=lambda name: name not in required):
        schema, words = _own(title)[name], _words(title, name)
        if not _has_one_value(schema):
            mark = "\\*" if name in required else ""
            rows.setdefault((_type(title, name, schema), words), []).append(code(name) + mark)
            continue
        value = code(f"{name}={type_words(schema).removeprefix('only ').strip('`')}")
        fixed.append(value if name in required else value + _advice(words))
    lines = [
        (f"{', '.join(names)} ({kind})" if kind else ", ".join(names), words)
        for (kind, words), names in rows.items()
    ]
    return [*lines, ("Only", ", ".join(fixed))]


def _advice(words: str) -> str:
    """Return the words for a field that does nothing if they name another place to look."""
    return f" ({words})" if "`" in words else ""


@cache
def _own(title: str) -> dict[str, Schema]:
    """Return the fields to list under a title: a schema's name, or one of `_SHARED`."""
    if title not in (*_SHARED, *_GENERATION):
        return _properties(title)
    chat, completion = map(_properties, _GENERATION)
    both = {name: schema for name, schema in chat.items() if completion.get(name) == schema}
    names: dict[str, Iterable[str]] = {
        _SERVICE: ModelRequest.model_fields | ServiceOptions.model_fields,
        _SAMPLING: SamplingOptions.model_fields,
        _EVERY: GenerationOptions.model_fields,
        _COMPLETIONS: both,
    }
    if title in _GENERATION:
        return {name: schema for name, schema in _properties(title).items() if name not in both}
    earlier = set(chain(*(names[one] for one in _SHARED[: _SHARED.index(title)])))
    return {name: both[name] for name in names[title] if name not in earlier}


def _told_first(title: str, name: str, schema: Schema) -> str:
    """Return the first schema on the page with this very field."""
    for first in _TOLD_FIRST:
        if first == title:
            break
        other = _own(first).get(name)
        if other is not None and _told(first, name, other) == _told(title, name, schema):
            return first
    return title


def _told(title: str, name: str, schema: Schema) -> tuple[str, str, bool, str]:
    is_required = name in _required(title)
    return type_words(schema), _default(schema), is_required, _words(title, name)


def _required(title: str) -> Sequence[str]:
    required: Sequence[str] = () if title in _SHARED else _schema(title).get("required", ())
    return required


def _type(title: str, name: str, schema: Schema) -> str:
    default = _default(schema, _DEFAULTS.get(name) if title in _SHARED else None)
    kind = _LINK.sub(_shown, type_words(schema))
    if kind.count(" or ") > _MOST_KINDS:
        kind = ""  # the words say it
    if not default:
        return "" if kind == "string" else kind
    return default if kind == "boolean" else f"{kind}, default {default}"


def _shown(link: re.Match[str]) -> str:
    """Return the link to a listed schema, or an unlisted schema itself."""
    if link[1] not in _UNLISTED:
        return link[0]
    listed_ones = frozenset(chain(*_OBJECTS.values()))
    shown = skeleton(_schema(link[1]), _document(), listed_ones)
    inline = " ".join(shown.replace("|null", "").split())
    return code(inline.replace("{ ", "{").replace(" }", "}"))


def _answer(name: str) -> str:
    return skeleton(_schema(name), _document(), _repeated())


def _parts_of_answers() -> str:
    """Return the objects that several answers have."""
    named = _repeated()
    return "\n".join(
        f"    {name} = {skeleton(_schema(name), _document(), named - {name}).strip()}"
        for name in sorted(named)
    )


@cache
def _repeated() -> frozenset[str]:
    """Return the names of large schemas that answers have more than once."""
    used: Counter[str] = Counter()
    for name in set(_answers()):
        used.update(references(_schema(name), _document()))
    return frozenset(
        name
        for name, times in used.items()
        if times > 1 and "\n" in skeleton(_schema(name), _document())
    )


def _default(schema: Schema, otherwise: Any = None) -> str:
    alternatives = schema.get("anyOf", [schema])
    given = [one["default"] for one in alternatives if one.get("default") is not None]
    default = given[0] if given else otherwise
    return "" if default in (None, [], ()) else code(json.dumps(default))


def _words(title: str, name: str) -> str:
    """Raises `KeyError` for a field without a docstring."""
    schema = _GENERATION[0] if title in _SHARED else title
    return uncapitalized(clause(_model_words(schema)[name]))


@cache
def _model_words(title: str) -> dict[str, str]:
    """Return the docstrings of a schema's fields; key the name in JSON."""
    own = {model for model in _below(BaseModel) if model.__module__.startswith("legato.")}
    (model,) = (model for model in own if model.__name__ == title)
    return field_words(model)


def _below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for subclass in model.__subclasses__():
        yield from _below(subclass)


def _answers() -> list[str]:
    """Names of the schemas that requests are answered with, but for those in another one."""
    names = []
    for _, operation in _operations():
        for response in operation["responses"].values():
            content = response.get("content", {})
            reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
            names.append(reference.rpartition("/")[2])
    whole = json.dumps([_schema(name) for name in filter(None, names)])
    return [name for name in names if name and f'/{name}"' not in whole]


def _bodies() -> Iterator[str]:
    for _, operation in _operations():
        if "requestBody" in operation and operation["tags"][0] not in _UNLISTED_TAGS:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            yield schema["$ref"].rpartition("/")[2]


def _operations() -> Iterator[tuple[str, Schema]]:
    for path, operations in _document()["paths"].items():
        for method, operation in operations.items():
            yield f"{method.upper()} {path}", operation


def _properties(name: str) -> dict[str, Schema]:
    properties: dict[str, Schema] = _schema(name)["properties"]
    return properties


def _schema(name: str) -> Schema:
    schema: Schema = _document()["components"]["schemas"][name]
    return schema


@cache
def _document() -> Schema:
    return openapi_document()
