"""The API reference says what the code does."""

import re
from pathlib import Path

import pytest
from scripts.api_reference import http_api, words
from scripts.api_reference.docstrings import Entry, parse
from scripts.api_reference.pages import PAGES, rendered

from legato.core.config_fields import fields_of
from legato.server.config import ServerConfig
from tests import house


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


def test_every_word_is_used() -> None:
    fields = {
        (part.removeprefix("fields of "), field)
        for part, write in http_api.parts().items()
        if part.startswith("fields")
        for field in re.findall(r"^\| `(\w+)`", write(), re.MULTILINE)
    }
    known = {name for _, name in fields} | {f"{title}.{name}" for title, name in fields}
    assert words.FIELDS.keys() <= known
    assert known.issuperset(name for names in words.ORIGINS.values() for name in names)


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
