"""The keywords of a JSON schema that hold schemas."""

from collections.abc import Callable
from typing import Any

DEFINITIONS = ("$defs", "definitions")
NAMED = (*DEFINITIONS, "properties", "patternProperties")
"""Keywords with one schema for each name."""
LISTED = ("prefixItems", "allOf", "anyOf", "oneOf")
SINGLE = ("items", "additionalProperties")


def mapped(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the schema with `change` applied to each direct subschema."""
    made = dict(schema)
    for name in (*NAMED, *LISTED, *SINGLE):
        if name in schema:
            made[name] = change(schema[name]) if name in SINGLE else _each(schema[name], change)
    return made


def _each(schemas: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(schemas, dict):
        return {name: change(schema) for name, schema in schemas.items()}
    return list(map(change, schemas)) if isinstance(schemas, list) else schemas
