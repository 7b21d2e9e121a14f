"""Which objects take no property that their schema does not name."""

from typing import Any

import pytest

from legato.language.forms.source import closed

_NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
_CLOSED = {**_NAMED, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (_NAMED, _CLOSED),
        ({"type": "array", "items": _NAMED}, {"type": "array", "items": _CLOSED}),
        ({"anyOf": [_NAMED, {"type": "null"}]}, {"anyOf": [_CLOSED, {"type": "null"}]}),
        (
            {"$ref": "#/$defs/one", "$defs": {"one": _NAMED}},
            {"$ref": "#/$defs/one", "$defs": {"one": _CLOSED}},
        ),
        (
            {"type": "object", "additionalProperties": _NAMED},
            {"type": "object", "additionalProperties": _CLOSED},
        ),
        # A property may be named like a keyword.
        (
            {"properties": {"properties": _NAMED, "not": {"type": "string"}}},
            {
                "properties": {"properties": _CLOSED, "not": {"type": "string"}},
                "additionalProperties": False,
            },
        ),
    ],
)
def test_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**_NAMED, "additionalProperties": True},
        {**_NAMED, "patternProperties": {"^b": {}}},
        {**_NAMED, "required": ["b"]},
        {**_NAMED, "minProperties": 2},
        {"allOf": [_NAMED, {"properties": {"b": {}}}]},
        {"$ref": "#/$defs/one", "$defs": {"one": _NAMED}, "properties": {"b": {}}},
        {"properties": {"a": _NAMED}, "anyOf": [{"required": ["a"]}, {"properties": {"b": {}}}]},
    ],
)
def test_left_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
