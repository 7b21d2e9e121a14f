"""Which keywords of a JSON schema hold schemas."""

from collections.abc import Callable
from typing import Any

DEFINITIONS = ("$defs", "definitions")
NAMED = (*DEFINITIONS, "properties", "patternProperties")
"""One for each name."""
LISTED = ("prefixItems", "allOf", "anyOf", "oneOf")
SINGLE = ("items", "additionalProperties")


def mapped(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The schema with each of those directly in it changed."""
    made = dict(schema)
    for name in (*NAMED, *LISTED, *SINGLE):
        if name in schema:
            made[name] = change(schema[name]) if name in SINGLE else _each(schema[name], change)
    return made


def _each(schemas: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(schemas, dict):
        return {name: change(schema) for name, schema in schemas.items()}
    return list(map(change, schemas)) if isinstance(schemas, list) else schemas
