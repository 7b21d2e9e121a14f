"""Building blocks of the request models, and what /openapi.json says of them."""

import json
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from legato.core.sampling_params import MAX_LOGIT_BIAS, MAX_STOP

_NULL = {"type": "null"}


class RequestModel(BaseModel):
    """A JSON object that refuses fields it does not know; null is the same as not sent.

    JSON has one kind of number: 16.0 is as good an integer as 16.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: _whole(value) for name, value in data.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        described = handler.resolve_ref_schema(handler(schema))
        fields = described.get("properties", {})
        for name in fields.keys() - described.get("required", ()):
            if _NULL not in fields[name].get("anyOf", ()):
                fields[name] = {"anyOf": [fields[name], _NULL]}
        return described


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class _Only:
    def __init__(self, allowed: tuple[object, ...]) -> None:
        self._allowed = allowed

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, _schema: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": list(self._allowed)}

    def _check(self, value: object) -> object:
        if value not in self._allowed:
            supported = " or ".join(map(json.dumps, self._allowed))
            raise ValueError(f"only {supported} is supported")
        return value


def only(*allowed: object) -> _Only:
    """A field whose other values Legato does not support; these change nothing here."""
    return _Only(allowed)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else (value,)


def _integer_keys(value: Any) -> Any:
    """JSON has no integer keys, so token ids come as strings."""
    if not isinstance(value, dict):
        return value
    if not all(key.isascii() and key.isdecimal() and len(key) < 20 for key in value):
        raise ValueError("the keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


def _joined_text(value: Any) -> Any:
    """One text from a message's parts, which stand on lines of their own."""
    if not isinstance(value, list):
        return value
    return "\n".join(map(_part_text, value))


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f"a content part of type {kind!r} is not supported; parts are "
            '{"type": "text", "text": "..."}'
        )
    text: str = part["text"]
    return text


def _one_or_several(item: JsonSchemaValue) -> WithJsonSchema:
    several = {"type": "array", "items": item, "maxItems": MAX_STOP}
    return WithJsonSchema({"anyOf": [item, several]})


_TOKEN_ID = {"type": "integer", "minimum": 0}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,19}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_LOGIT_BIAS,
}

Strings = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_tuple),
    _one_or_several({"type": "string", "minLength": 1}),
]
TokenIds = Annotated[tuple[int, ...], BeforeValidator(_as_tuple), _one_or_several(_TOKEN_ID)]
LogitBias = Annotated[dict[int, float], BeforeValidator(_integer_keys), WithJsonSchema(_BIASES)]
MessageText = Annotated[
    str,
    BeforeValidator(_joined_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}),
]
