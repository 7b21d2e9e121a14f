"""Finds JSON schemas that refer to themselves without a base case, so that no value ends."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from legato.language.forms.place import schemas_within
from legato.language.forms.subschemas import DEFINITIONS

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
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found
