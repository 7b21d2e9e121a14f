"""The JSON types of tools' arguments, which some models write as bare text.

`Alternatives` is the one reading of a parameter's schema: the grammar of a call is written from
it, and the reader of the call decides by it what a bare text stands for.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, NamedTuple
from urllib.parse import unquote

from legato.language.message.message_syntax import ArgumentType, ToolParameters

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$defs", "definitions", "x-guidance", "nullable"),
    }
)
"""Keywords that allow no value less."""
_KINDS = ("string", "number", "boolean", "null", "array", "object")
_NAMES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),  # before int, its superclass
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)
_COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "type", "enum", "const"})
_REST = frozenset({"additionalProperties", "patternProperties"})
_MAX_STEPS = 200_000
_MAX_EXACT = 2**53
_MAX_DEPTH = 32
_MAX_ALTERNATIVES = 64


class Alternative(NamedTuple):
    """The values of one JSON type that a schema allows.

    Attributes:
        kind: the type.
        schema: all that bounds the values further; without references and alternatives. What could
            not be resolved stands under "allOf".
        values: the only values, if the schema lists them.
    """

    kind: str
    schema: dict[str, Any]
    values: list[Any] | None = None

    @property
    def is_free(self) -> bool:
        """Whether all values of the type are allowed."""
        return self.values is None and self.schema.keys() <= ANNOTATIONS


class Alternatives:
    """Finds what the schemas within one schema allow, type by type.

    References may fan out: beyond a number of steps for the whole schema, what is left stays
    unresolved. A schema is a step, as is a listed value, and a pair of alternatives or of values
    that are compared.

    Args:
        root: the schema that references are looked up in.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_steps = 0
        self._opened: list[str] = []  # references that are being resolved

    def of(self, schema: Any) -> list[Alternative]:
        """Return what a schema allows, in its order; nothing if it allows nothing."""
        if schema is False:
            return []
        if not isinstance(schema, dict):
            return [Alternative(kind, {}) for kind in _KINDS]
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS or len(self._opened) > _MAX_DEPTH:
            return _unresolved(schema)
        found = _own(schema)
        self._num_steps += sum(len(one.values or ()) for one in found)
        for inner in (self._behind_reference(schema), *self._combined(schema)):
            if inner is not None:
                self._num_steps += _num_compared(found, inner)
                if self._num_steps > _MAX_STEPS:
                    return _unresolved(schema)
                found = _both(found, inner)
            if len(found) > _MAX_ALTERNATIVES:
                return _unresolved(schema)
        if schema.get("nullable") is True:
            found.append(Alternative("null", {}))
        return found

    def type_of(self, schema: Any) -> ArgumentType:
        """Return what a bare text may stand for by a parameter's schema."""
        found = self.of(schema)
        free = [one.kind for one in found if one.values is None]
        listed = [value for one in found for value in one.values or ()]
        return ArgumentType(
            kinds=tuple(dict.fromkeys(kind for kind in free if kind != "string")),
            values=tuple(json.dumps(value) for value in listed if not isinstance(value, str)),
            texts=tuple(value for value in listed if isinstance(value, str)),
            is_text="string" in free,
        )

    def _behind_reference(self, schema: dict[str, Any]) -> list[Alternative] | None:
        """Return what the schema that this one refers to allows; None if it refers to none.

        A reference adds nothing to itself.
        """
        place = schema.get("$ref")
        if not isinstance(place, str):
            return None
        if place in self._opened:
            return []
        self._opened.append(place)
        found = self.of(_target(place, self._root))
        self._opened.pop()
        return found

    def _combined(self, schema: dict[str, Any]) -> Iterator[list[Alternative]]:
        """Yield what each of the combined schemas, or of the lists of alternatives, allows."""
        yield from (self.of(part) for part in schema.get("allOf", ()))
        if "anyOf" in schema:
            yield _with_joint_lists([one for part in schema["anyOf"] for one in self.of(part)])
        if "oneOf" in schema:
            parts = schema["oneOf"]
            found = _with_joint_lists([one for part in parts for one in self.of(part)])
            self._num_steps += _num_compared(found, found)
            if self._num_steps > _MAX_STEPS or not _are_all_apart(found):
                found = [one._replace(schema={**one.schema, "oneOf": parts}) for one in found]
            yield found


class ObjectParts(NamedTuple):
    """An object's properties.

    Attributes:
        named: name, schema and whether it is required.
        others: the schema of any other property; False allows none.
    """

    named: list[tuple[str, Any, bool]]
    others: Any


def object_parts(schema: Mapping[str, Any]) -> ObjectParts:
    """Return the properties that an `Alternative` of kind "object" allows.

    An object that names properties and says nothing about others has no others, as in
    `legato.language.forms.source.closed`.
    """
    required, properties = schema.get("required", []), dict(schema.get("properties", {}))
    for name in required:
        properties.setdefault(name, schema.get("additionalProperties", True))
    others = schema.get("additionalProperties", not ("properties" in schema or required))
    named = [(name, part, name in required) for name, part in properties.items()]
    return ObjectParts(named, others)


def typed_parameters(schema: dict[str, Any]) -> ToolParameters:
    """Return the types of a tool's parameters by their schema."""
    alternatives = Alternatives(schema)
    try:
        objects = [one for one in alternatives.of(schema) if one.kind == "object"]
        parts = [object_parts(one.schema) for one in objects]
        named: dict[str, list[Any]] = {}
        for part in parts:
            for name, inner, _ in part.named:
                named.setdefault(name, []).append(inner)
        others = [part.others for part in parts if part.others is not False]
        return ToolParameters(
            named={name: alternatives.type_of({"anyOf": inner}) for name, inner in named.items()},
            others=alternatives.type_of({"anyOf": others}) if others else ArgumentType.any(),
        )
    except (AttributeError, TypeError, ValueError, RecursionError):
        return ToolParameters()  # no JSON schema; the server has refused those


def _own(schema: dict[str, Any]) -> list[Alternative]:
    """Return what a schema's own keywords allow."""
    declared = schema.get("type", _KINDS)
    kinds = [declared] if isinstance(declared, str) else declared
    rest = {key: value for key, value in schema.items() if key not in _COMBINING}
    listed = schema["enum"] if isinstance(schema.get("enum"), list) else None
    if "const" in schema:
        listed = [schema["const"]]
    if listed is None:
        return [Alternative(kind, rest) for kind in dict.fromkeys(kinds)]
    found: dict[str, list[Any]] = {}
    for value in map(_as_integer, listed):
        kind = _kind_of(value)
        if kind in kinds or (kind == "integer" and "number" in kinds):
            found.setdefault(kind, []).append(value)
    return [Alternative(kind, rest, values) for kind, values in found.items()]


def _unresolved(schema: dict[str, Any]) -> list[Alternative]:
    return [Alternative(kind, {"allOf": [schema]}) for kind in _KINDS]


def _with_joint_lists(found: list[Alternative]) -> list[Alternative]:
    """Return the alternatives with one list of values for each type, unless they overlap."""
    listed: dict[str, list[Any]] = {}
    others: list[Alternative] = []
    for one in found:
        if one.values is not None and one.schema.keys() <= ANNOTATIONS:
            listed.setdefault(one.kind, []).extend(one.values)
        else:
            others.append(one)
    if any(len(set(map(_canonical, values))) < len(values) for values in listed.values()):
        return found
    return [*(Alternative(kind, {}, values) for kind, values in listed.items()), *others]


def _are_all_apart(found: list[Alternative]) -> bool:
    """Whether it is plain that no value is of two alternatives."""
    if len(found) > _MAX_ALTERNATIVES:
        return False
    tagged = [(one, _tags(one) if one.kind == "object" else {}) for one in found]
    return all(
        _intersection(one, other) is None or _differ(tags, others)
        for (one, tags), (other, others) in combinations(tagged, 2)
    )


def _differ(tags: dict[str, list[Alternative]], others: dict[str, list[Alternative]]) -> bool:
    """Whether a property that both objects must have has other values in each."""
    return any(not _both(tags[name], others[name]) for name in tags.keys() & others.keys())


def _tags(one: Alternative) -> dict[str, list[Alternative]]:
    """Return the properties that an object must have, of listed values."""
    return {
        name: _own(part)
        for name, part, is_required in object_parts(one.schema).named
        if is_required and isinstance(part, dict) and part.keys() & {"const", "enum"}
    }


def _both(first: list[Alternative], second: list[Alternative]) -> list[Alternative]:
    """Return what both allow, in the order of the second, which says more of its types."""
    pairs = (_intersection(one, other) for other in second for one in first)
    return [pair for pair in pairs if pair is not None]


def _num_compared(first: list[Alternative], second: list[Alternative]) -> int:
    """Return how many pairs of alternatives `_both` compares, and of listed values."""
    one, other = (
        [len(each.values) for each in found if each.values is not None] for found in (first, second)
    )
    num_values = len(one) * sum(other) + len(other) * sum(one)
    return len(first) * len(second) + num_values


def _intersection(one: Alternative, other: Alternative) -> Alternative | None:
    kinds = {one.kind, other.kind}
    if len(kinds) > 1 and kinds != {"integer", "number"}:
        return None
    values = other.values if one.values is None else one.values
    if one.values is not None and other.values is not None:
        allowed = {_canonical(value) for value in other.values}
        values = [value for value in one.values if _canonical(value) in allowed]
        if not values:
            return None
    kind = one.kind if len(kinds) == 1 else "integer"
    if values is not None and kind == "integer":
        values = [value for value in values if isinstance(value, int)]
        if not values:
            return None
    return Alternative(kind, _merged(one.schema, other.schema), values)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of both schemas' bounds."""
    first, second = one.keys() - ANNOTATIONS, other.keys() - ANNOTATIONS
    if not (first and second):
        return {**one, **other}
    is_apart = not first & second and not (first | second) & _REST
    if is_apart or all(one.get(key) == other.get(key) for key in first | second):
        return {**one, **other}
    if first | second <= {"properties", "required"}:
        properties = dict(one.get("properties", {}))
        for name, part in other.get("properties", {}).items():
            properties[name] = {"allOf": [properties[name], part]} if name in properties else part
        required = dict.fromkeys([*one.get("required", ()), *other.get("required", ())])
        return {**one, **other, "properties": properties, "required": list(required)}
    return {"allOf": [one, other]}


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema at a local reference; one that is not found allows all."""
    found: Any = root if reference.startswith("#") else None
    for name in reference[1:].split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _as_integer(value: Any) -> Any:
    """Return a number without a fraction, such as 1.0, as an integer."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT
    return int(value) if is_whole else value


def _kind_of(value: Any) -> str:
    return next((name for kind, name in _NAMES if isinstance(value, kind)), "string")
