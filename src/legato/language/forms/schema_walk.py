"""Walks JSON schemas: sub-schemas, their places, bounds, and recursion without an end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

DEFINITIONS = ("$defs", "definitions")
NAMED = (*DEFINITIONS, "properties", "patternProperties")
"""Keywords with one schema for each name."""
LISTED = ("prefixItems", "allOf", "anyOf", "oneOf")
SINGLE = ("items", "additionalProperties")

MAX_SCHEMAS = 5_000
MAX_NESTING = 120
"""Objects and lists within one another; llguidance's parser takes 128."""
_MAX_EXACT = 2**53 - 1
_NUMBERS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("const", "enum"),
)


def mapped(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the schema with `change` applied to each direct subschema."""
    made = dict(schema)
    for name in (*NAMED, *LISTED, *SINGLE):
        if name in schema:
            made[name] = change(schema[name]) if name in SINGLE else _each(schema[name], change)
    return made


def _each(schemas: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(schemas, dict):
        return {name: change(schema) for name, schema in schemas.items()}
    return list(map(change, schemas)) if isinstance(schemas, list) else schemas


_MOST_SCHEMAS = 10_000
"""Schemas, counted each time, that may be compiled in search of a fault."""


def faulty_place(schema: dict[str, Any], is_faulty: Callable[[dict[str, Any]], bool]) -> str:
    """Return the JSON pointer of the innermost schema with the fault of the outermost.

    Stops where the work would be too much: the pointer is then that of a schema around it.

    Args:
        is_faulty: whether a schema, with the definitions that it uses, has that fault.
    """
    place, within, num_left = "#", schemas_within(schema), _MOST_SCHEMAS
    while num_left > 0:
        step, inner = next(within, ("", None))
        if inner is None:
            break
        whole = {**used_definitions(inner, schema), **inner}
        num_left -= _size(whole)
        if num_left > 0 and is_faulty(whole):
            place += step
            within = schemas_within(inner)
    return place


def used_definitions(part: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """Return those of a schema's definitions that a part of it refers to, directly or not."""
    used: dict[str, dict[str, Any]] = {}
    unread: list[Any] = [part]
    while unread:
        value = unread.pop()
        if isinstance(value, list):
            unread += value
        elif isinstance(value, dict):
            unread += value.values()
            steps = str(value.get("$ref", "")).split("/")
            if len(steps) < 3 or steps[1] not in DEFINITIONS:
                continue
            name = _unescaped(steps[2])
            named = schema.get(steps[1])
            if isinstance(named, dict) and name in named.keys() - used.get(steps[1], {}).keys():
                used.setdefault(steps[1], {})[name] = named[name]
                unread.append(named[name])
    return used


def _size(schema: Any) -> int:
    """Return how many objects a schema has."""
    num_objects, unread = 0, [schema]
    while unread:
        part = unread.pop()
        num_objects += isinstance(part, dict)
        unread += (
            part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        )
    return num_objects


def placed_schemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema and all schemas in it, each after its JSON pointer."""
    unread = [("#", schema)] if isinstance(schema, dict) else []
    while unread:
        place, part = unread.pop()
        yield place, part
        unread += [(place + step, inner) for step, inner in schemas_within(part)]


def schemas_within(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield direct subschemas, each after its part of a JSON pointer; definitions come first."""
    for name in NAMED:
        named = schema.get(name)
        if isinstance(named, dict):
            yield from _objects((f"{name}/{_escaped(key)}", value) for key, value in named.items())
    for name in LISTED:
        listed = schema.get(name)
        if isinstance(listed, list):
            yield from _objects((f"{name}/{i}", value) for i, value in enumerate(listed))
    yield from _objects((name, schema.get(name)) for name in SINGLE)


def _objects(schemas: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"/{step}", schema) for step, schema in schemas if isinstance(schema, dict))


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _unescaped(step: str) -> str:
    return unquote(step).replace("~1", "/").replace("~0", "~")


ENDLESS = "no output at all satisfies it: it refers to itself without end"
_UNUSED = tuple(f"/{name}/" for name in DEFINITIONS)

_Placed = tuple[str, Any]
"""A part of a JSON pointer, or a whole one, and the schema at it."""


def endless_place(schema: Any) -> str | None:
    """Return the JSON pointer of the first schema that only an endless value satisfies, or None.

    A schema is finite once all its needs are: a reference needs its target, an object its required
    properties, `anyOf` one of its alternatives. A schema that never becomes finite needs itself.
    """
    parts = _parts(schema)
    finite = [part for part in parts if part.num_unmet == 0]
    for part in finite:
        for need in part.needs:
            if not need.is_met:
                need.is_met = True
                need.owner.num_unmet -= 1
                if need.owner.num_unmet == 0:
                    finite.append(need.owner)
    return next((part.place for part in parts if part.num_unmet > 0), None)


@dataclass
class _Part:
    """One schema.

    Attributes:
        parent: the part whose pointer `step` extends; None if `step` is a whole pointer.
        num_unmet: its needs that no finite schema meets yet.
        needs: needs of other schemas that this one may meet.
    """

    schema: Any
    parent: "_Part | None"
    step: str
    num_unmet: int = 0
    needs: "list[_Need]" = field(default_factory=list)

    @property
    def place(self) -> str:
        steps, part = [self.step], self.parent
        while part is not None:
            steps.append(part.step)
            part = part.parent
        return "".join(reversed(steps))


@dataclass
class _Need:
    owner: _Part
    is_met: bool = False


def _parts(schema: Any) -> list[_Part]:
    """Return the schemas that a value may have to satisfy, outermost first, with their needs."""
    root = _Part(schema, None, "#")
    parts, by_id = [root], {id(schema): root}

    def part_at(parent: _Part, step: str, inner: Any) -> _Part:
        if id(inner) not in by_id:
            by_id[id(inner)] = _Part(inner, None if step.startswith("#") else parent, step)
            parts.append(by_id[id(inner)])
        return by_id[id(inner)]

    for part in parts:
        if not isinstance(part.schema, dict):
            continue
        for step, inner in schemas_within(part.schema):
            if not step.startswith(_UNUSED):
                part_at(part, step, inner)
        for alternatives in _needed(part.schema, schema):
            need = _Need(part)
            part.num_unmet += 1
            for step, inner in alternatives:
                part_at(part, step, inner).needs.append(need)
    return parts


def _needed(schema: dict[str, Any], root: Any) -> Iterator[list[_Placed]]:
    """Yield what a value must satisfy, each as a list of alternatives."""
    reference = schema.get("$ref")
    target = _target(reference, root) if isinstance(reference, str) else None
    if target is not None:
        yield [(str(reference), target)]
    yield from ([one] for one in _listed(schema, "allOf"))
    yield from filter(None, (_listed(schema, name) for name in ("anyOf", "oneOf")))
    if schema.get("type") in ("object", ["object"]):
        yield from _needed_properties(schema)
    if schema.get("type") in ("array", ["array"]):
        yield from _needed_items(schema)


def _needed_properties(schema: dict[str, Any]) -> Iterator[list[_Placed]]:
    required, properties = schema.get("required"), schema.get("properties")
    if isinstance(required, list) and isinstance(properties, dict):
        for name in filter(lambda name: isinstance(name, str), required):
            if name in properties:
                yield [(f"/properties/{name}", properties[name])]


def _needed_items(schema: dict[str, Any]) -> Iterator[list[_Placed]]:
    least = schema.get("minItems")
    if not isinstance(least, int):
        return
    first = _listed(schema, "prefixItems")
    yield from ([one] for one in first[: max(0, least)])
    if least > len(first) and "items" in schema:
        yield [("/items", schema["items"])]


def _listed(schema: dict[str, Any], name: str) -> list[_Placed]:
    values = schema.get(name)
    return [(f"/{name}/{i}", v) for i, v in enumerate(values)] if isinstance(values, list) else []


def _target(reference: str, root: Any) -> Any:
    """Return the schema at a pointer within the document; None if there is none."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = root
    for step in reference.split("/")[1:]:
        key = _unescaped(step)
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


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
