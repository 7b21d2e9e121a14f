"""Prepares JSON schemas for llguidance."""

from typing import Any

from legato.grammar.closed import closed
from legato.grammar.formats import with_strict_formats


def guided(schema: dict[str, Any], options: dict[str, Any], *, is_lenient: bool) -> dict[str, Any]:
    """Return the schema for a rule's `%json`.

    Args:
        options: llguidance's own, for whitespace.
        is_lenient: whether to ignore keywords unknown to llguidance, and let alternatives of
            `oneOf` overlap.
    """
    guidance = options | {"lenient": is_lenient, "coerce_one_of": is_lenient}
    return {**_strict(closed(schema)), "x-guidance": guidance}


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        made: dict[str, Any] = with_strict_formats(schema)
    except RecursionError:  # too deep: the compiler reports that
        return schema
    return made
