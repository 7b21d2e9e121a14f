"""Objects without properties that their schema does not name.

JSON schemas allow those wherever `additionalProperties` is not said. But a small model that is free
to do so makes up one property after the other until its tokens run out, and who leaves the keyword
out seldom means that; xgrammar, vLLM's default, reads schemas in the same way.
"""

from typing import Any

from legato.grammar.subschemas import mapped

_TOLD = frozenset({"additionalProperties", "patternProperties"})
_COMBINING = frozenset(
    {"allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"}
)
"""Under these, the properties of an object may be named at several places."""
_COMBINED = frozenset({"$ref", "anyOf", "oneOf"})
"""Under these, too, where properties stand beside them."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` where it names properties and says no other.

    One that combines schemas of an object is returned as it is: each names a part of it only.
    """
    try:
        made: dict[str, Any] = _closed(schema)
    except (_CombinedError, RecursionError):  # too deep: the compiler says so
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
    """Whether it says nothing of properties that it does not name, and needs none of them."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or schema.keys() & _TOLD:
        return False
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    needs_others = isinstance(required, list) and not properties.keys() >= set(map(str, required))
    return not needs_others and not (isinstance(least, int) and least > len(properties))
