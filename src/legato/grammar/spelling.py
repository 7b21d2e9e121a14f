"""Texts of a JSON schema that a vocabulary has no tokens for."""

from typing import Any

from legato.grammar.place import schemas_within
from legato.text.vocabulary import Vocabulary

_CONTROL_CHARS = 0x20
"""Below this JSON writes escapes, which every vocabulary has."""


def missing_bytes(vocabulary: Vocabulary) -> frozenset[int]:
    """Those that no token has, of all that JSON writes as they are; takes ten milliseconds."""
    return frozenset(range(_CONTROL_CHARS, 256)).difference(vocabulary.text)


def unspelled(schema: Any, missing: frozenset[int]) -> tuple[str, str] | None:
    """The first text in a constant or a property's name that has a byte no token has.

    An output can begin with what comes before such a byte, and has no way on from there.

    Args:
        missing: such bytes.

    Returns:
        JSON pointer of the schema that has the text, and the text.
    """
    try:
        return _found(schema, missing, "#") if missing and isinstance(schema, dict) else None
    except RecursionError:  # too deep: the compiler says so
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
    """All that a value of JSON has, names included."""
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
