"""The JSON types of tools' arguments, which some models write as bare text."""

from collections.abc import Iterator, Sequence
from typing import Any

from legato.text.message_syntax import ArgumentTypes

_MAX_DEPTH = 8
_NAMES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),  # before int, its superclass
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)


def argument_types(tools: Sequence[dict[str, Any]]) -> ArgumentTypes:
    """Return the types of all parameters. Args: tools: in OpenAI's form."""
    found: ArgumentTypes = {}
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if isinstance(properties, dict):
            found[str(function.get("name"))] = {
                str(name): schema_types(part, schema) for name, part in properties.items()
            }
    return found


def schema_types(schema: Any, root: dict[str, Any]) -> tuple[str, ...]:
    """Return the JSON types that a schema allows, in its order; none if it names none.

    Args:
        root: the schema that references are looked up in.
    """
    return tuple(dict.fromkeys(_types(schema, root, _MAX_DEPTH)))


def resolved(schema: Any, root: dict[str, Any]) -> Any:
    """Return the schema behind a local reference, or the schema itself if it is none."""
    for _ in range(_MAX_DEPTH):
        place = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(place, str) or not place.startswith("#"):
            return schema
        schema = root
        for name in place[1:].split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _types(schema: Any, root: dict[str, Any], depth: int) -> Iterator[str]:
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or not depth:
        return
    declared = schema.get("type", ())
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (name for name in declared if isinstance(name, str))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    if not declared:
        yield from map(_type_of, [*values, *([schema["const"]] if "const" in schema else [])])
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else ():
            yield from _types(part, root, depth - 1)
    if schema.get("nullable") is True:
        yield "null"


def _type_of(value: Any) -> str:
    return next((name for kind, name in _NAMES if isinstance(value, kind)), "string")
