"""Base models of bodies; they refuse or drop unknown fields, and check lengths before contents."""

import json
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from legato.api.limits import MAX_FIELDS, MAX_NAME_CHARS
from legato.core.errors import InvalidRequestError

_NULL = {"type": "null"}
_BOUNDS = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}  # key: JSON type


class IgnoredFields:
    """Drops the unknown fields of a request's objects; the context of its validation.

    Attributes:
        names: of the dropped fields, each once, in the order of the request.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def drop(self, model: type[BaseModel], sent: dict[str, Any]) -> None:
        """Remove from an object what its model would refuse to know."""
        if model.model_config.get("extra") != "forbid":
            return
        known = _names(model)
        for name in [name for name in sent if name not in known]:
            del sent[name]
            self.names[name] = None


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """Return the fields of a model by the names in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class RequestModel(BaseModel):
    """A JSON object that refuses unknown fields; null is the same as not sent.

    With `IgnoredFields` as the context of the validation, it drops them.
    JSON has one kind of number: 16.0 is as good an integer as 16.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise InvalidRequestError(f"an object has {len(data)} fields, over {MAX_FIELDS}")
        sent = {name: _whole(value) for name, value in data.items() if value is not None}
        if isinstance(info.context, IgnoredFields):
            info.context.drop(cls, sent)
        return sent

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        described = handler.resolve_ref_schema(handler(schema))
        fields = described.get("properties", {})
        for name in fields.keys() - described.get("required", ()):
            if "anyOf" not in fields[name]:
                fields[name] = {"anyOf": [fields[name]]}
            if _NULL not in fields[name]["anyOf"]:
                fields[name]["anyOf"] = [*fields[name]["anyOf"], _NULL]
        if described.get("additionalProperties") is False:
            described["additionalProperties"] = _NULL
        return described


class LenientModel(RequestModel):
    """Ignores unknown fields: clients send back objects with more in them."""

    model_config = ConfigDict(extra="ignore")


class PartError(ValueError):
    """An error within the value of a field.

    Attributes:
        path: keys and indices that lead from the field to the error.
    """

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class AtMost:
    """Bounds the length of a text, list or object before its parts are validated.

    It must stand last in an `Annotated`. pydantic's own `max_length` would count the converted
    value.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        described = handler(schema)
        for one in described.get("anyOf", [described]):
            if one.get("type") in _BOUNDS:
                one[_BOUNDS[one["type"]]] = self._limit
        return described

    def _check(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple | dict) and len(value) > self._limit:
            unit = "characters" if isinstance(value, str) else "entries"
            raise ValueError(f"has {len(value)} {unit}, over {self._limit}")
        return value


class OrText:
    """A list, or a text in its place.

    Args:
        as_list: converts the text to a list.
    """

    def __init__(self, as_list: Callable[[str], list[Any]]) -> None:
        self._as_list = as_list

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(schema)]}

    def _check(self, value: Any) -> Any:
        return self._as_list(value) if isinstance(value, str) else value


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
    """Accept only these values of a field, which change nothing; refuse others as unsupported."""
    return _Only(allowed)


def by_type(what: str, *kinds: str, **others: str) -> tuple[Discriminator, BeforeValidator]:
    """Choose a model of a union by an object's "type"; each has a `Tag` of `<type>`.

    Args:
        what: the name for such an object in errors.
        others: types that share a tag; key the type, value the tag without brackets.
    """

    def tag(value: Any) -> str:
        kind: str = value["type"] if isinstance(value, dict) else value.type
        return f"<{others.get(kind, kind)}>"

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if kind not in kinds and not (isinstance(kind, str) and kind in others):
            raise ValueError(f"{what} of type {json.dumps(kind, default=str)} is not supported")
        return value

    return Discriminator(tag), BeforeValidator(check)


Name = Annotated[str, AtMost(MAX_NAME_CHARS)]
Prompt = str | list[int]
"""A prompt as a client sends it: a text or token ids."""


class ModelRequest(RequestModel):
    """A request that names a model; only the served one exists."""

    model: Name | None = None
