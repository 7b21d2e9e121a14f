"""Locates the fault in a JSON schema that does not compile."""

from collections.abc import Callable, Iterator
from typing import Any

from legato.grammar.subschemas import DEFINITIONS, LISTED, NAMED, SINGLE

_MOST_TRIED = 500


def faulty_place(schema: dict[str, Any], is_faulty: Callable[[dict[str, Any]], bool]) -> str:
    """Return the JSON pointer of the innermost schema with the fault of the outermost.

    Args:
        is_faulty: whether a schema, given the outermost one's definitions, has that fault; called a
            bounded number of times.
    """
    place, within = "#", schemas_within(schema)
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    for _ in range(_MOST_TRIED):
        step, inner = next(within, ("", None))
        if inner is None:
            break
        if is_faulty({**definitions, **inner}):
            place += step
            within = schemas_within(inner)
    return place


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
