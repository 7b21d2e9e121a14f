"""Finds texts in a JSON schema for which a vocabulary has no tokens."""

from typing import Any

from legato.grammar.place import schemas_within
from legato.text.vocabulary import Vocabulary

_CONTROL_CHARS = 0x20
"""Characters below this are escaped in JSON; every vocabulary has tokens for escapes."""


def missing_bytes(vocabulary: Vocabulary) -> frozenset[int]:
    """Return the bytes, of all that JSON writes unescaped, that no token has; takes ten ms."""
    return frozenset(range(_CONTROL_CHARS, 256)).difference(vocabulary.text)


def unspelled(schema: Any, missing: frozenset[int]) -> tuple[str, str] | None:
    """Return the first constant or property name with a byte that no token has.

    An output could begin with the bytes before it, and would have no way to go on.

    Args:
        missing: bytes that no token has.

    Returns:
        JSON pointer of the schema with the text, and the text; None without one.
    """
    try:
        return _found(schema, missing, "#") if missing and isinstance(schema, dict) else None
    except RecursionError:  # too deep: the compiler reports that
        return None


def _found(schema: dict[str, Any], missing: frozenset[int], place: str) -> tuple[str, str] | None:
    for text in _texts([schema.get("const"), schema.get("enum"), list(_names(schema))]):
        if not missing.isdisjoint(text.encode()):
            return place, text
    inner = (_found(part, missing, f"{place}{step}") for step, part in schemas_within(schema))
    return next(filter(None, inner), None)


def _names(schema: dict[str, Any]) -> Any:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else ()


def _texts(value: Any) -> list[str]:
    """Return all strings in a JSON value, names included."""
    texts, left = [], [value]
    while left:
        match left.pop():
            case str(text):
                texts.append(text)
            case list(parts):
                left += parts
            case dict(named):
                left += [*named, *named.values()]
    return texts
