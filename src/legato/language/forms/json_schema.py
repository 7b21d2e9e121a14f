"""Prepares JSON schemas for llguidance."""

import re
from typing import Any

from legato.language.forms.schema_walk import mapped

_TOLD = frozenset({"additionalProperties", "patternProperties"})
_COMBINING = frozenset(
    {"allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"}
)
"""Keywords under which the properties of one object may be named at several places."""
_COMBINED = frozenset({"$ref", "anyOf", "oneOf"})
"""Keywords that do so too beside `properties`."""


def enforced(schema: dict[str, Any], *, is_strict: bool) -> dict[str, Any]:
    """Prepare a schema for `StructuredOutputs`.

    Args:
        is_strict: whether unsupported keywords are refused, not ignored.
    """
    return schema if is_strict else {**schema, "x-guidance": {"lenient": True}}


def guided(schema: dict[str, Any], options: dict[str, Any], *, is_lenient: bool) -> dict[str, Any]:
    """Return the schema for a rule's `%json`.

    Args:
        options: llguidance's own, for whitespace.
        is_lenient: whether to ignore keywords unknown to llguidance and patterns that it cannot
            enforce, and let alternatives of `oneOf` overlap.
    """
    guidance = options | {"lenient": is_lenient, "coerce_one_of": is_lenient}
    prepared = _prepared(closed(schema), is_lenient=is_lenient)
    return {**prepared, "x-guidance": guidance}


def _prepared(schema: dict[str, Any], *, is_lenient: bool) -> dict[str, Any]:
    try:
        made: dict[str, Any] = with_strict_formats(schema)
        if is_lenient:
            made = _with_regular_patterns(made)
    except RecursionError:  # too deep: the compiler reports that
        return schema
    return made


def _with_regular_patterns(schema: Any) -> Any:
    """Return the schema without the patterns that no automaton can enforce."""
    if not isinstance(schema, dict):
        return schema
    made = mapped(schema, _with_regular_patterns)
    if not _is_regular(made.get("pattern")):
        del made["pattern"]
    named = made.get("patternProperties")
    if isinstance(named, dict) and not all(map(_is_regular, named)):
        made["patternProperties"] = {key: part for key, part in named.items() if _is_regular(key)}
        made.pop("additionalProperties", None)  # a name may match a pattern that is left out
    return made


def _is_regular(pattern: Any) -> bool:
    """Whether a pattern has no look-around, word boundary or reference to a group."""
    if not isinstance(pattern, str):
        return True
    return not any(found["irregular"] for found in _PATTERN_PART.finditer(pattern))


_PATTERN_PART = re.compile(
    r"(?P<irregular>\\[bBk1-9]|\(\?<?[=!])|\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]?", re.DOTALL
)
"""A class that is not closed goes on to the end: reading takes linear time."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with `additionalProperties: false` where it says nothing about others.

    JSON Schema allows other properties by default. But a small model that may add properties
    invents them until its tokens run out, and authors who omit the keyword seldom mean to allow
    them; xgrammar, vLLM's default, reads schemas in the same way.

    A schema that combines schemas of one object is returned unchanged: each names only a part of
    it.
    """
    try:
        made: dict[str, Any] = _closed(schema)
    except (_CombinedError, RecursionError):  # too deep: the compiler reports that
        return schema
    return made


class _CombinedError(Exception):
    pass


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    if schema.keys() & _COMBINING or ("properties" in schema and schema.keys() & _COMBINED):
        raise _CombinedError
    made = mapped(schema, _closed)
    if _is_open(schema):
        made["additionalProperties"] = False
    return made


def _is_open(schema: dict[str, Any]) -> bool:
    """Whether a schema names properties, says nothing about others and requires no others."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or schema.keys() & _TOLD:
        return False
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    needs_others = isinstance(required, list) and not properties.keys() >= set(map(str, required))
    return not needs_others and not (isinstance(least, int) and least > len(properties))


def _host(most_chars: int) -> str:
    """Return a pattern of up to five labels of at most `most_chars` characters each.

    Hyphens at a label's third and fourth place are excluded: they announce encodings that only a
    decoder can check. Limiting each label takes a fifth of the time that an intersection takes.
    """
    one, other = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
    rest = f"(?:{other}{{0,{most_chars - 5}}}{one})?"
    label = f"{one}(?:{one}|{other}(?:{one}{rest}|-{one}{rest}))?"
    return rf"{label}(?:\.{label}){{0,4}}"


_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = f"^(?:[0-9]{{4}}-(?:0[13-9]|1|02-[01]|02-2[0-8])|{_LEAP_YEAR}-02-29)"

_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]"
_MAILBOX = "|".join(
    rf"{_ATOM}{{1,{longest}}}(?:\.{_ATOM}{{1,{longest}}}){{{num_dots}}}"
    for num_dots, longest in ((0, 64), (1, 31), (2, 20), (3, 15))
)

_BESIDE = {
    "date": [_DAY],
    "date-time": [_DAY, "^.{17}[0-5]"],
    "time": ["^.{6}[0-5]"],
}
"""Key a format, value patterns that its strings must match too."""
_INSTEAD = {
    "email": [f"^(?:{_MAILBOX})@{_host(36)}$"],
    "hostname": [f"^{_host(49)}$"],
}
"""Key a format, value patterns that replace llguidance's own."""


def with_strict_formats(schema: Any) -> Any:
    """Return the schema with patterns for the formats that llguidance checks less strictly.

    Each pattern excludes strings that llguidance's own lets through: the 29th of February outside
    leap years, leap seconds, which most languages' clocks do not support, and too long mailboxes
    and hosts. All strings that remain are valid, but not all valid strings remain.
    """
    if not isinstance(schema, dict):
        return schema
    made = mapped(schema, with_strict_formats)
    name, others = schema.get("format"), made.get("allOf", [])
    if not isinstance(name, str) or name not in _BESIDE | _INSTEAD or not isinstance(others, list):
        return made
    if name in _INSTEAD:
        del made["format"]
    patterns = [{"pattern": pattern} for pattern in (_BESIDE | _INSTEAD)[name]]
    return {**made, "allOf": [*others, *patterns]}
