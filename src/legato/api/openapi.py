"""Describes requests and answers in /openapi.json; handlers parse and encode them past FastAPI."""

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from legato.api.http.bodies import JSON_LINES
from legato.api.http.errors import ErrorBody
from legato.api.http.middleware import OPEN_PATHS

_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_REFERENCE = "#/components/schemas/{name}"
_BEARER, _X_API_KEY = "bearer", "x-api-key"
_LINK = re.compile(r"\[(.+?)\]\(.+?\)")

# Errors that any request may get.
_COMMON_ERRORS = {
    HTTPStatus.BAD_REQUEST: "Malformed, invalid, or not supported here.",
    HTTPStatus.UNAUTHORIZED: "The API key is missing or wrong.",
    HTTPStatus.FORBIDDEN: "The host, the web page's origin, or the client is not an allowed one.",
    HTTPStatus.REQUEST_TIMEOUT: "The request did not arrive in time.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is too large.",
    HTTPStatus.TOO_MANY_REQUESTS: "Overloaded, or its TTFT SLO cannot be met; see Retry-After.",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "The headers are too large.",
    HTTPStatus.NOT_IMPLEMENTED: "A transfer coding other than chunked.",
    HTTPStatus.SERVICE_UNAVAILABLE: "Shutting down, over --max-connections, or the engine is gone.",
}
_ERRORS = {
    **_COMMON_ERRORS,
    HTTPStatus.CONFLICT: "A trace is running already, or none is.",
    HTTPStatus.NOT_FOUND: "There is no such model or path.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The step that computed this request failed.",
}

# A stream's schema describes one event, as tools for OpenAPI expect.
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk as JSON, or [DONE]."}},
    "required": ["data"],
}

Responses = dict[int | str, dict[str, Any]]
_TYPES: dict[str, type] = {}
"""All types that `responses` and `body_route` have referred to; key the name."""


class DescribedApi(FastAPI):
    """An application that describes its requests and answers.

    Args:
        asks_for_key: whether all but `OPEN_PATHS` need an API key.
    """

    def __init__(self, *, asks_for_key: bool, **options: Any) -> None:
        super().__init__(**options)
        self._asks_for_key = asks_for_key

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = self._describe()
        return self.openapi_schema

    def _describe(self) -> dict[str, Any]:
        document = get_openapi(title=self.title, version=self.version, routes=self.routes)
        schemas = document["components"]["schemas"]
        named = [_TYPES[name] for name in sorted(_TYPES)]
        requests = [one for one in named if issubclass(one, BaseModel)]
        answers = [one for one in named if one not in requests]
        schemas.update(msgspec.json.schema_components(answers, ref_template=_REFERENCE)[1])
        schemas.update(_described(requests))
        _add_words(schemas)
        # FastAPI's schemas for status 422, which is 400 here.
        for name in ("HTTPValidationError", "ValidationError"):
            del schemas[name]
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if self._asks_for_key and path not in OPEN_PATHS:
                    operation["security"] = [{_BEARER: []}, {_X_API_KEY: []}]
        if self._asks_for_key:
            document["components"]["securitySchemes"] = {
                _BEARER: {"type": "http", "scheme": "bearer"},
                _X_API_KEY: {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        _make_bounds_whole(document)
        return document


def body_route(
    request: type[BaseModel], answer: type, *, is_computed: bool = True, **further: Any
) -> dict[str, Any]:
    """Describe a route whose body FastAPI does not parse, for the keywords of its decorator.

    Args:
        request: the model of the body, which may name another model than the served one.
        is_computed: whether the engine computes the answer.
        answer, further: as of `responses`.
    """
    content = {"application/json": {"schema": _reference(request)}}
    errors = (HTTPStatus.NOT_FOUND, *([HTTPStatus.INTERNAL_SERVER_ERROR] if is_computed else []))
    return {
        "openapi_extra": {"requestBody": {"content": content, "required": True}},
        "responses": responses(answer, errors=errors, **further),
    }


def responses(
    answer: type | None = None,
    *,
    is_list: bool = False,
    errors: Iterable[HTTPStatus] = (),
    streams: bool = False,
    in_lines: bool = False,
    files: Iterable[str] = (),
    variants: Iterable[type] = (),
    error_body: type = ErrorBody,
) -> Responses:
    """Describe the answers of a route, for its `responses`.

    Args:
        answer: the msgspec type of its JSON.
        is_list: whether it answers with a list of them.
        errors: in addition to `_COMMON_ERRORS`.
        streams, in_lines: whether it may also answer with server-sent events, or with lines of the
            same JSON.
        files: media types of files that it may answer with.
        variants: types of answers in other modes, which are described beside this one.
        error_body: the msgspec type of its errors.
    """
    content: dict[str, Any] = {media_type: {} for media_type in files}
    for variant in variants:
        _reference(variant)
    if answer is not None:
        schema: dict[str, Any] = _reference(answer)
        content["application/json"] = {
            "schema": {"type": "array", "items": schema} if is_list else schema
        }
    if streams:
        content["text/event-stream"] = {"schema": _EVENT}
    if in_lines:
        content[JSON_LINES] = {"schema": {}}
    described: Responses = {200: {"description": "The answer.", "content": content}}
    for status in sorted({*_COMMON_ERRORS, *errors}):
        described[int(status)] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": _reference(error_body)}},
        }
    return described


def _described(models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """Return the schemas of the models and of models that they refer to; key the name."""
    template = _REFERENCE.format(name="{model}")
    _, document = models_json_schema(
        [(model, "validation") for model in models], ref_template=template
    )
    schemas: dict[str, Any] = document["$defs"]
    return schemas


def _add_words(schemas: dict[str, Any]) -> None:
    """Describe the fields of requests by their docstrings."""
    ours = [model for model in _below(BaseModel) if model.__module__.startswith("legato.")]
    words = {model.__name__: field_words(model) for model in ours}
    for name, schema in schemas.items():
        for field in schema.get("properties", {}).keys() & words.get(name, {}).keys():
            # The links are those of the page that lists the fields.
            schema["properties"][field]["description"] = _LINK.sub(r"\1", words[name][field])


def field_words(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings that follow a model's fields; key the field's name in JSON.

    They are empty where the sources are not installed.
    """
    told: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base.__module__.startswith("legato."):
            told |= _words_of(base.__module__).get(base.__name__, {})
    fields = model.model_fields.items()
    return {field.alias or name: told[name] for name, field in fields if name in told}


@cache
def _words_of(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of a module's fields; key the class, then the field."""
    try:
        source = Path(inspect.getfile(sys.modules[module])).read_text(encoding="utf-8")
    except OSError:
        return {}
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {node.name: dict(_words_in(node.body)) for node in classes}


def _words_in(body: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
    for pair in itertools.pairwise(body):
        match pair:
            case (
                ast.AnnAssign(target=ast.Name(name)),
                ast.Expr(value=ast.Constant(value=str(words))),
            ):
                yield name, words


def _below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for subclass in model.__subclasses__():
        yield from _below(subclass)


def _make_bounds_whole(node: Any) -> None:
    """Make bounds integers again: as FastAPI's floats, a 64-bit seed's are off by hundreds."""
    if isinstance(node, dict):
        for name in _BOUNDS & node.keys():
            if isinstance(node[name], float) and node[name].is_integer():
                node[name] = int(node[name])
    for child in node.values() if isinstance(node, dict) else node:
        if isinstance(child, dict | list):
            _make_bounds_whole(child)


def _reference(answer: type) -> dict[str, str]:
    """Refer to a type by its name; no two types of bodies or answers share one."""
    known = _TYPES.setdefault(answer.__name__, answer)
    assert known is answer, "two types of one name"
    return {"$ref": _REFERENCE.format(name=answer.__name__)}
