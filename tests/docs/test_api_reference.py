"""The API reference says what the code does."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel, Field
from scripts.api_reference import http_api, limits, words
from scripts.api_reference.app_without_engine import openapi_document
from scripts.api_reference.docstrings import Entry, parse
from scripts.api_reference.pages import PAGES, rendered

from legato.api.config import ServerConfig
from legato.api.http.middleware import OPEN_PATHS
from legato.api.openapi import field_words
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


def test_every_endpoint_has_a_row_of_the_table_of_keys() -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "expose.md"
    rows = re.findall(r"^\| (`.*?) \| (yes|no|without.*?) \|", page.read_text(), re.MULTILINE)
    allowed = {name: who for names, who in rows for name in re.findall("`([^`]+)`", names)}
    found = openapi_document()["paths"]
    for path, methods in found.items():
        for method, operation in methods.items():
            names = (f"{method.upper()} {path}", path, f"/{path.split('/')[1]}/...")
            who = next((allowed[name] for name in names if name in allowed), None)
            assert who is not None, f"{path} is in no row"
            is_admins = "For admins" in operation.get("description", "")
            assert (who == "no") == is_admins, path
            assert (who == "yes") == (path in OPEN_PATHS), path


def test_every_error_code_is_explained() -> None:
    raised = set()
    for file in house.sources():
        raised |= set(re.findall(r'\bcode="(\w+)"', file.read_text(encoding="utf-8")))
    assert raised == {code for codes in words.ERRORS.values() for code in codes} - {""}


def test_every_field_is_described_in_a_line() -> None:
    fields = http_api.documented_fields()
    assert len(fields) > 200
    for field in fields.values():
        assert 0 < len(field.words) <= 90, field
        assert "\n" not in field.words, field
    known = {field.name for field in fields.values()}
    assert known.issuperset(name for names in words.ORIGINS.values() for name in names)


def test_the_server_describes_every_field() -> None:
    schemas = openapi_document()["components"]["schemas"]
    listed = {field.schema for field in http_api.documented_fields().values()}
    for title in (*listed, "SettingsPatch", "TraceRequest"):
        for name, field in schemas[title]["properties"].items():
            assert field.get("description"), f"{title}.{name}"
            assert "](" not in field["description"], "a page's links lead nowhere from there"


class _Named(BaseModel):
    name: str = Field(alias="called")
    """The name."""
    text: str = ""
    size: int = 0
    """The base's size."""


class _Sized(_Named):
    size: int = 1
    """The size."""


def _moved(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the models be of a module of Legato's."""
    name = f"legato.{module.__name__}"
    monkeypatch.setitem(sys.modules, name, module)
    for model in (_Named, _Sized):
        monkeypatch.setattr(model, "__module__", name)


def test_words_of_a_field_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _moved(sys.modules[__name__], monkeypatch)
    assert field_words(_Named) == {"called": "The name.", "size": "The base's size."}
    assert field_words(_Sized) == {"called": "The name.", "size": "The size."}


def test_a_field_without_sources_has_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    unread = ModuleType("unread")
    unread.__file__ = "/nowhere/unread.py"
    _moved(unread, monkeypatch)
    assert field_words(_Sized) == {}


def test_every_consequence_is_of_a_limit() -> None:
    limited = [field for field in fields_of(ServerConfig) if field.name in words.BEYOND]
    assert {field.group for field in limited} == {"limits on clients"}
    assert len(limited) == len(words.BEYOND)


def test_bounds_of_fields_stand_on_the_http_page() -> None:
    assert limits.constants().keys() > limits.OF_TYPES
    (page,) = (page for page in PAGES if page.name == "http.md")
    text = page.read_text(encoding="utf-8")
    for name in limits.OF_TYPES:
        number = limits.constants()[name][0].replace(",", "").replace(" ** ", "^")
        assert re.search(rf"(≤|\.\.|, ){re.escape(number)}\b", text), name


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
