"""Forbids properties of an object that its schema does not name.

JSON Schema allows them unless `additionalProperties` says otherwise. But a small model that may add
properties invents them until its tokens run out, and authors who omit the keyword seldom mean to
allow them; xgrammar, vLLM's default, reads schemas in the same way.
"""

from typing import Any

from legato.grammar.subschemas import mapped

_TOLD = frozenset({"additionalProperties", "patternProperties"})
_COMBINING = frozenset(
    {"allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"}
)
"""Keywords under which the properties of one object may be named at several places."""
_COMBINED = frozenset({"$ref", "anyOf", "oneOf"})
"""Keywords that do so too beside `properties`."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with `additionalProperties: false` where it says nothing about others.

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
