"""Building blocks of the request models."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator


class RequestModel(BaseModel):
    """A JSON object that refuses fields it does not know; null is the same as not sent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


def only(*allowed: object) -> AfterValidator:
    """A field whose other values Legato does not support; these change nothing here."""
    supported = " or ".join(json.dumps(value) for value in allowed)

    def check(value: object) -> object:
        if value not in allowed:
            raise ValueError(f"only {supported} is supported")
        return value

    return AfterValidator(check)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else (value,)


def _integer_keys(value: Any) -> Any:
    """JSON has no integer keys, so token ids come as strings."""
    if not isinstance(value, dict):
        return value
    try:
        return {int(key): bias for key, bias in value.items()}
    except ValueError as error:
        raise ValueError("the keys must be token ids") from error


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


Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
TokenIds = Annotated[tuple[int, ...], BeforeValidator(_as_tuple)]
LogitBias = Annotated[dict[int, float], BeforeValidator(_integer_keys)]
MessageText = Annotated[str, BeforeValidator(_joined_text)]
