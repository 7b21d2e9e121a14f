"""Bounds of JSON schemas: of the work that they make, and of the numbers that are exact."""

from collections.abc import Iterator
from typing import Any

from legato.language.forms.schema_walk import placed_schemas

MAX_SCHEMAS = 5_000
MAX_NESTING = 120
"""Objects and lists within one another; llguidance's parser takes 128."""
_MAX_EXACT = 2**53 - 1
_NUMBERS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("const", "enum"),
)


def excess(schema: Any) -> str | None:
    """Return why a schema is too large to be worked with; None if it is not.

    Reads no more of it than the bounds allow.
    """
    num_schemas, unread = 0, [(schema, 1)]
    while unread:
        part, depth = unread.pop()
        if depth > MAX_NESTING:
            return f"is nested over {MAX_NESTING} deep"
        if isinstance(part, dict):
            num_schemas += 1
            unread += [(inner, depth + 1) for inner in part.values()]
        elif isinstance(part, list):
            unread += [(inner, depth + 1) for inner in part]
        if num_schemas > MAX_SCHEMAS:
            return f"has over {MAX_SCHEMAS} schemas"
    return None


def inexact(schema: Any) -> str | None:
    """Return which integer of a schema cannot be enforced exactly; None if there is none.

    llguidance reads numbers as floats.
    """
    for place, part in placed_schemas(schema):
        for name in _NUMBERS:
            large = (value for value in _integers(part.get(name)) if abs(value) > _MAX_EXACT)
            for value in large:
                return f"{name} {value} is beyond 2^53 - 1 and cannot be exact, at {place}"
    return None


def _integers(value: Any) -> Iterator[int]:
    """Yield all integers in a JSON value."""
    unread = [value]
    while unread:
        part = unread.pop()
        if isinstance(part, int):
            yield part
        elif isinstance(part, list):
            unread += part
        elif isinstance(part, dict):
            unread += part.values()
