"""Locates the fault in a JSON schema that does not compile."""

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from legato.language.forms.subschemas import DEFINITIONS, LISTED, NAMED, SINGLE

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
            name = unquote(steps[2]).replace("~1", "/").replace("~0", "~")
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
