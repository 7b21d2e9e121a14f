"""The API reference says what the code does."""

import re
import sys
from pathlib import Path

import pytest
from scripts.api_reference import http_api, words
from scripts.api_reference.docstrings import Entry, field_words, parse
from scripts.api_reference.pages import PAGES, rendered

from legato.api.config import ServerConfig
from legato.core.config_fields import fields_of
from tests import house

SOURCES = Path(__file__).parents[2] / "src" / "legato"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_is_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == rendered(page), "run `make docs`"


def test_every_endpoint_has_a_place_on_the_page() -> None:
    (page,) = (page for page in PAGES if page.name == "http.md")
    headings = " ".join(re.findall(r"^## (.*)", page.read_text(encoding="utf-8"), re.MULTILINE))
    endpoints = re.findall(r"`(\w+) (/[\w/]*)", http_api.parts()["endpoints"]())
    assert len(endpoints) > 10
    for method, path in endpoints:
        assert method in headings
        assert path.rstrip("/") in headings


def test_every_error_code_is_explained() -> None:
    raised = set()
    for file in house.sources():
        raised |= set(re.findall(r'\bcode="(\w+)"', file.read_text(encoding="utf-8")))
    assert raised == words.CODES.keys()


def test_every_field_is_described_in_a_line() -> None:
    fields = http_api.documented_fields()
    assert len(fields) > 200
    for field in fields.values():
        assert 0 < len(field.words) <= 90, field
        assert "\n" not in field.words, field
    known = {field.name for field in fields.values()}
    assert known.issuperset(name for names in words.ORIGINS.values() for name in names)


class _Named:
    name: str
    """The name."""
    text: str = ""
    size: int = 0
    """The base's size."""


class _Sized(_Named):
    size: int = 1
    """The size."""


_Sized.__module__ = _Named.__module__ = "legato.made_up"


def test_words_of_a_field_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "legato.made_up", sys.modules[__name__])
    assert field_words(_Named) == {"name": "The name.", "size": "The base's size."}
    assert field_words(_Sized) == {"name": "The name.", "size": "The size."}


def test_every_consequence_is_of_a_limit() -> None:
    limited = [field for field in fields_of(ServerConfig) if field.name in words.BEYOND]
    assert {field.group for field in limited} == {"limits on clients"}
    assert len(limited) == len(words.BEYOND)


def test_docstrings_are_read_by_section() -> None:
    doc = parse(
        """What it is.

        More of it.

        Args:
            a, b: some
                words.
            c (int | None): more.

        Raises:
            ValueError: never.
        """
    )
    assert doc.body == "What it is.\n\nMore of it."
    assert doc.words("Args") == {"a": "some words.", "b": "some words.", "c": "more."}
    assert doc.entries("Args")["c"] == Entry("more.", "int | None")
    assert doc.words("Raises") == {"ValueError": "never."}
    assert doc.words("Returns") == {}
