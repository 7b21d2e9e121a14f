"""The HTTP API, as its OpenAPI document describes it, and as it refuses requests."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from openai.types import completion_create_params as openai_completion
from openai.types.chat import chat_completion_stream_options_param as openai_stream
from openai.types.chat import completion_create_params as openai_chat
from pydantic import BaseModel

from legato.core.sampling_params import SamplingParams
from legato.server.requests.generation import GenerationOptions
from scripts.api_reference.app_without_engine import ask
from scripts.api_reference.docstrings import field_words, parse
from scripts.api_reference.json_types import Schema, skeleton, type_words
from scripts.api_reference.markdown import capitalized, clause, code, table
from scripts.api_reference.words import CODES, DEFINED_BY, ORIGINS, REFUSED, RIGHT

_GENERATION = ("ChatRequest", "CompletionRequest")
_OBJECTS = (
    *("ChatMessage", "MessageToolCall", "CalledFunction", "Tool", "FunctionDefinition"),
    *("StreamOptions", "KVTransferRequest", "ResponseFormat", "JsonSchemaFormat"),
    *("FunctionTool", "CustomTool", "InputFormat", "NamespaceTool"),
    *("TextOptions", "TextFormat", "ReasoningOptions"),
    *(
        "ResponseStreamOptions",
        "AnthropicMessage",
        "TextBlock",
        "AnthropicTool",
        "AnthropicToolChoice",
    ),
    *("Thinking", "OutputConfig", "OutputFormat", "AnthropicMetadata"),
    *("ContextManagement", "ClearThinking", "ClearToolUses"),
    *("Trigger", "KeptToolUses", "InputTokens", "SentSamplingParams", "ParseContext"),
)
_MIXED = (*_GENERATION, "StreamOptions")
"""Schemas with fields of more than one origin."""
_OPTIONS = tuple(name for name in GenerationOptions.model_fields if name not in ("model", "stream"))
"""Fields that a request for generation has in every API."""
_HEADS = ("field", "type", "default", "defined by", "")
_OPENAI_TYPES = (
    openai_chat.CompletionCreateParamsBase,
    openai_chat.CompletionCreateParamsStreaming,
    openai_completion.CompletionCreateParamsBase,
    openai_completion.CompletionCreateParamsStreaming,
    openai_stream.ChatCompletionStreamOptionsParam,
)
_RANGE = re.compile(r", (in [(\[].*|at most \d+)$")
"""What the type of a field tells already."""
_SAMPLING = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
_SAMPLING_WORDS = parse(SamplingParams.__doc__).words("Attributes")


def parts() -> Mapping[str, Callable[[], str]]:
    """Key a part of the page; value writes it."""
    return {
        "endpoints": _endpoints,
        "statuses": _statuses,
        "codes": lambda: table(
            ("code", ""), [(code(name), words) for name, words in CODES.items()]
        ),
        "fields": _shared_fields,
        "options": lambda: ", ".join(map(code, _OPTIONS)) + ".",
        **{f"fields of {name}": partial(_own_fields, name) for name in (*_bodies(), *_OBJECTS)},
        **{f"refused by {path}": partial(_refused, path) for path in REFUSED},
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
    found: dict[str, DocumentedField] = {}
    operations = ("TraceRequest", "SettingsPatch")
    names = [*(name for name in _bodies() if name not in operations), *_OBJECTS]
    for schema in dict.fromkeys(names):
        for name, described in _properties(schema).items():
            found[f"{schema}.{name}"] = DocumentedField(
                schema, name, _has_one_value(described), _words(schema, name)
            )
    return found


def _has_one_value(schema: Schema) -> bool:
    kinds = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    return len(kinds) == 1 and ("const" in kinds[0] or len(kinds[0].get("enum", ())) == 1)


def _endpoints() -> str:
    rows = []
    for label, operation in _operations():
        (tag,) = operation["tags"]
        says = operation["description"].split("\n")[0]
        rows.append((code(label), clause(says), DEFINED_BY[tag]))
    return table(("endpoint", "", "defined by"), rows)


def _statuses() -> str:
    told = {
        int(status): response["description"]
        for _, operation in _operations()
        for status, response in operation["responses"].items()
    }
    del told[HTTPStatus.OK]
    return table(("status", ""), [(str(status), clause(told[status])) for status in sorted(told)])


def _shared_fields() -> str:
    """Return the fields that both kinds of completions share, with equal schemas."""
    chat, completion = map(_properties, _GENERATION)
    shared = {name: schema for name, schema in chat.items() if completion.get(name) == schema}
    rows = [
        (
            code(name),
            type_words(schema),
            _default(schema, _SAMPLING.get(name)),
            _origin(name),
            _words(_GENERATION[0], name),
        )
        for name, schema in shared.items()
    ]
    return table(_HEADS, rows)


def _own_fields(title: str) -> str:
    own = _properties(title)
    if title in _GENERATION:
        chat, completion = map(_properties, _GENERATION)
        own = {
            name: schema for name, schema in own.items() if chat.get(name) != completion.get(name)
        }
    elif "stream" in own:
        own = {name: schema for name, schema in own.items() if name not in _OPTIONS}
    required = _schema(title).get("required", ())
    rows = []
    for name, schema in sorted(own.items(), key=lambda field: field[0] not in required):
        default = "required" if name in required else _default(schema)
        origin = _origin(name) if title in _MIXED else ""
        rows.append((code(name), type_words(schema), default, origin, _words(title, name)))
    return table(_HEADS, rows)


def _refused(path: str) -> str:
    """What the server says to requests that are wrong in one thing."""
    rows = []
    for wrong in REFUSED[path]:
        response = ask("POST", path, {**RIGHT[path], **wrong})
        assert response.status_code == HTTPStatus.BAD_REQUEST, f"{path} takes {wrong}"
        rows.append((code(json.dumps(wrong)), response.json()["error"]["message"]))
    return table(("sent", "message"), rows)


def _answer(name: str) -> str:
    return skeleton(_schema(name), _document())


def _default(schema: Schema, otherwise: Any = None) -> str:
    alternatives = schema.get("anyOf", [schema])
    given = [one["default"] for one in alternatives if one.get("default") is not None]
    default = given[0] if given else otherwise
    return "" if default is None else code(json.dumps(default))


def _origin(name: str) -> str:
    if any(name in params.__annotations__ for params in _OPENAI_TYPES):
        return "OpenAI"
    return next((origin for origin, names in ORIGINS.items() if name in names), "vLLM")


def _words(title: str, name: str) -> str:
    """Raises `KeyError` for a field without a docstring, here or in `SamplingParams`."""
    words = _model_words(title)
    if name in words:
        return clause(words[name])
    return capitalized(_RANGE.sub("", clause(_SAMPLING_WORDS[name])))


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
