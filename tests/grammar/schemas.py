"""JSON schemas that tests ask for."""

from typing import Any


def nested(depth: int) -> dict[str, Any]:
    """Return a schema of so many objects, each in the one before, around a string."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema
