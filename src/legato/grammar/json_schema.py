"""JSON schemas as llguidance is to read them."""

from typing import Any

from legato.grammar.closed import closed
from legato.grammar.formats import with_strict_formats


def guided(schema: dict[str, Any], options: dict[str, Any], *, is_lenient: bool) -> dict[str, Any]:
    """The schema in a rule's `%json`.

    Args:
        options: llguidance's own, of whitespace.
        is_lenient: whether what llguidance does not know is left out, and alternatives of `oneOf`
            may overlap.
    """
    guidance = options | {"lenient": is_lenient, "coerce_one_of": is_lenient}
    return {**_strict(closed(schema)), "x-guidance": guidance}


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        made: dict[str, Any] = with_strict_formats(schema)
    except RecursionError:  # too deep: the compiler says so
        return schema
    return made
