"""A table whose keys are a closed set has a row for each of its members."""

import pkgutil
import typing
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Literal

import pytest

import legato.api
import legato.core
import legato.engine.client
import legato.observe

_PACKAGES = (legato.core, legato.engine.client, legato.observe, legato.api)


def tables() -> Iterator[tuple[str, set[Any], set[Any]]]:
    """Name, keys and members of the set; of each module's dict with such an annotation."""
    for package in _PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            loaded = import_module(module.name)
            if not hasattr(loaded, "__annotations__"):
                continue
            for name, kind in typing.get_type_hints(loaded).items():
                table, (key, *_) = getattr(loaded, name, None), typing.get_args(kind) or [None]
                if isinstance(table, Mapping) and typing.get_origin(key) is Literal:
                    yield f"{loaded.__name__}.{name}", set(table), set(typing.get_args(key))


FOUND = {name: (keys, members) for name, keys, members in tables()}


@pytest.mark.parametrize("name", FOUND)
def test_a_table_has_every_member(name: str) -> None:
    keys, members = FOUND[name]
    assert keys == members


def test_the_known_tables_are_found() -> None:
    known = {
        "legato.observe.traces.spans._OPERATIONS",
        "legato.api.openai.generate_answer._ANSWERS",
    }
    assert known <= FOUND.keys()
