"""The HTTP API, as its OpenAPI document describes it, and as it refuses requests."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cache, partial
from http import HTTPStatus
from itertools import chain
from typing import Any, NamedTuple

import msgspec
from openai.types import completion_create_params as openai_completion
from openai.types.chat import chat_completion_stream_options_param as openai_stream
from openai.types.chat import completion_create_params as openai_chat
from pydantic import BaseModel

from legato.api.bodies.generation_options import GenerationOptions
from legato.core.sampling_params import SamplingParams
from scripts.api_reference.app_without_engine import ask
from scripts.api_reference.docstrings import field_words, parse
from scripts.api_reference.json_types import Schema, references, skeleton, type_words
from scripts.api_reference.markdown import clause, code, items, uncapitalized
from scripts.api_reference.words import CODES, DEFINED_BY, ORIGINS, REFUSED, RIGHT

_GENERATION = ("ChatRequest", "CompletionRequest")
_EVERY = "every generation"
"""Fields that each body has that asks for generated tokens."""
_COMPLETIONS = "all completions"
"""Fields that both kinds of completions have beside these."""
_OBJECTS = {
    "objects of chats": (
        *("ChatMessage", "MessageToolCall", "CalledFunction", "Tool", "FunctionDefinition"),
    ),
    "objects of completions": (
        *("ResponseFormat", "JsonSchemaFormat", "StreamOptions", "KVTransferRequest"),
    ),
    "objects of responses": (
        *("FunctionTool", "CustomTool", "InputFormat", "NamespaceTool"),
        *("TextOptions", "TextFormat", "ReasoningOptions", "ResponseStreamOptions"),
    ),
    "objects of messages": (
        *("AnthropicMessage", "TextBlock", "AnthropicTool", "AnthropicToolChoice", "Thinking"),
        *("OutputConfig", "OutputFormat", "AnthropicMetadata", "ContextManagement"),
        *("ClearThinking", "ClearToolUses", "Trigger", "KeptToolUses", "InputTokens"),
    ),
    "objects of generate": ("SentSamplingParams", "ParseContext"),
}
"""Key a part of the page; value the schemas that it lists."""
_TOLD_FIRST = {
    _EVERY: "[every generation](#fields-of-every-generation)",
    _COMPLETIONS: "[all completions](#fields-of-all-completions)",
    "ChatRequest": "[chats](#post-v1chatcompletions)",
    "EmbeddingRequest": "[embeddings](#post-v1embeddings)",
    "MessagesRequest": "[messages](#post-v1messages)",
    "FunctionTool": "[FunctionTool](#functiontool)",
}
"""Key a schema whose fields others share; value its place on the page."""
_MIXED = (_EVERY, _COMPLETIONS, *_GENERATION, "StreamOptions")
"""Schemas with fields of more than one origin."""
_OPENAI_TYPES = (
    openai_chat.CompletionCreateParamsBase,
    openai_chat.CompletionCreateParamsStreaming,
    openai_completion.CompletionCreateParamsBase,
    openai_completion.CompletionCreateParamsStreaming,
    openai_stream.ChatCompletionStreamOptionsParam,
)
_NO_EFFECT = "changes nothing: "
_RANGE = re.compile(r", (in [(\[].*|at most \d+)$|, at most \d+(?=[,:;])")
"""What the type of a field tells already."""
_SAMPLING = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
_SAMPLING_WORDS = parse(SamplingParams.__doc__).words("Attributes")


def parts() -> Mapping[str, Callable[[], str]]:
    """Key a part of the page; value writes it."""
    return {
        "endpoints": _endpoints,
        "statuses": _statuses,
        "codes": lambda: items((code(name), words) for name, words in CODES.items()),
        "refused": _refused,
        "fields of every generation": partial(_fields, _EVERY),
        "fields of all completions": partial(_fields, _COMPLETIONS),
        "origins": _origins,
        **{f"fields of {name}": partial(_fields, name) for name in _bodies()},
        **{part: partial(_objects, names) for part, names in _OBJECTS.items()},
        "parts of answers": _parts_of_answers,
        **{name: partial(_answer, name) for name in _answers()},
    }


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
    operations = ("TraceRequest", "SettingsPatch")
    return {
        f"{schema}.{name}": DocumentedField(
            schema, name, _has_one_value(described), _words(schema, name)
        )
        for schema, name, described in listed()
        if schema not in operations
    }


def sampling_fields() -> Set[str]:
    """Return the fields of `SamplingParams` that the lists of generations and completions have."""
    return _SAMPLING.keys() & (_own(_EVERY).keys() | _own(_COMPLETIONS).keys())


def listed() -> Iterator[tuple[str, str, Schema]]:
    """Yield all fields of requests: the schema's name, the field's, and the field's schema."""
    for title in dict.fromkeys([*_bodies(), *chain(*_OBJECTS.values())]):
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
        says = clause(operation["description"].split("\n")[0])
        lines.setdefault(DEFINED_BY[tag], {}).setdefault(says, []).append(code(label))
    return "\n\n".join(
        f"{origin}:\n\n{items((', '.join(labels), says) for says, labels in of_one.items())}"
        for origin, of_one in lines.items()
    )


def _statuses() -> str:
    told = {
        int(status): response["description"]
        for _, operation in _operations()
        for status, response in operation["responses"].items()
    }
    del told[HTTPStatus.OK]
    return items((str(status), clause(told[status])) for status in sorted(told))


def _objects(names: tuple[str, ...]) -> str:
    return "\n\n".join(f"### {name}\n{_fields(name)}" for name in names)


def _fields(title: str) -> str:
    """Return a list of a schema's fields: own ones, those without effect, those told elsewhere."""
    required = _required(title)
    own: dict[tuple[str, str], list[str]] = {}  # key type and words
    fixed: list[str] = []
    idle: dict[str, list[str]] = {}  # key the reason
    shared: dict[str, list[str]] = {}  # key the schema that explains them
    for name, schema in sorted(_own(title).items(), key=lambda field: field[0] not in required):
        words = _words(title, name)
        if (first := _told_first(title, name, schema)) != title:
            shared.setdefault(first, []).append(code(name))
        elif words.startswith(_NO_EFFECT):
            idle.setdefault(words.removeprefix(_NO_EFFECT), []).append(code(name))
        elif _has_one_value(schema) and name not in required:
            fixed.append(f"{code(name)} {type_words(schema).removeprefix('only ')} ({words})")
        else:
            words = "" if _has_one_value(schema) else words
            kind = _type(title, name, schema, name in required)
            own.setdefault((kind, words), []).append(code(name))
    lines = [
        (f"{', '.join(names)} ({kind})" if kind else ", ".join(names), words)
        for (kind, words), names in own.items()
    ]
    if fixed:
        lines.append(("With one value alone", "; ".join(fixed)))
    if idle:
        reasons = (f"{', '.join(names)} ({reason})" for reason, names in idle.items())
        lines.append(("Without effect", "; ".join(reasons)))
    for first, names in shared.items():
        which = "all" if len(names) == len(_own(first)) else ", ".join(names)
        lines.append((f"As of {_TOLD_FIRST[first]}", which))
    return items(lines)


@cache
def _own(title: str) -> dict[str, Schema]:
    """Return the fields to list under a title: a schema's name, `_EVERY` or `_COMPLETIONS`."""
    if title not in (_EVERY, _COMPLETIONS, *_GENERATION):
        return _properties(title)
    chat, completion = map(_properties, _GENERATION)
    both = {name: schema for name, schema in chat.items() if completion.get(name) == schema}
    every = {name: both[name] for name in GenerationOptions.model_fields}
    if title == _EVERY:
        return every
    if title == _COMPLETIONS:
        return {name: schema for name, schema in both.items() if name not in every}
    return {name: schema for name, schema in _properties(title).items() if name not in both}


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
    is_schema = title not in (_EVERY, _COMPLETIONS)
    required: Sequence[str] = _schema(title).get("required", ()) if is_schema else ()
    return required


def _type(title: str, name: str, schema: Schema, is_required: bool) -> str:
    otherwise = _SAMPLING.get(name) if title in (_EVERY, _COMPLETIONS) else None
    default = _default(schema, otherwise)
    kind = type_words(schema)
    if is_required:
        return f"{kind}, required" if kind else "required"
    if not default:
        return "" if kind == "string" else kind
    return f"default {default}" if kind == "boolean" else f"{kind}, default {default}"


def _origins() -> str:
    """Return the names of fields that OpenAI lacks, by who defined them."""
    names: dict[str, list[str]] = {}
    for title in _MIXED:
        for name in _own(title):
            if (origin := _origin(name)) != "OpenAI":
                names.setdefault(origin, []).append(code(name))
    return items((origin, ", ".join(names[origin])) for origin in sorted(names))


def _refused() -> str:
    """Return what the server says to requests that are wrong in one thing."""
    lines = []
    for path, requests in REFUSED.items():
        lines.append(f"- {code(path)}")
        for wrong in requests:
            response = ask("POST", path, {**RIGHT[path], **wrong})
            assert response.status_code == HTTPStatus.BAD_REQUEST, f"{path} takes {wrong}"
            message = response.json()["error"]["message"]
            lines.append(f"    - {code(json.dumps(wrong))}: {message}")
    return "\n".join(lines)


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


def _origin(name: str) -> str:
    if any(name in params.__annotations__ for params in _OPENAI_TYPES):
        return "OpenAI"
    return next((origin for origin, names in ORIGINS.items() if name in names), "vLLM")


def _words(title: str, name: str) -> str:
    """Raises `KeyError` for a field without a docstring, here or in `SamplingParams`."""
    words = _model_words(_GENERATION[0] if title in (_EVERY, _COMPLETIONS) else title)
    if name in words:
        return uncapitalized(clause(words[name]))
    return _RANGE.sub("", clause(_SAMPLING_WORDS[name]))


@cache
def _model_words(title: str) -> dict[str, str]:
    """Return the docstrings of a schema's fields; key the name in JSON."""
    own = {model for model in _below(BaseModel) if model.__module__.startswith("legato.")}
    (model,) = (model for model in own if model.__name__ == title)
    aliases = {name: field.alias or name for name, field in model.model_fields.items()}
    return {aliases[name]: words for name, words in field_words(model).items() if name in aliases}


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
        if "requestBody" in operation:
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
    document: Schema = ask("GET", "/openapi.json").json()
    return document
