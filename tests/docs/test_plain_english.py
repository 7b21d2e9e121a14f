"""Pages, docstrings and comments use plain English: no file gets more of the listed phrases."""

from pathlib import Path

import pytest
from scripts import plain_english


def test_no_file_has_more_phrases_than_it_may_have() -> None:
    assert plain_english.wrong(plain_english.phrases(), plain_english.allowed()) == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("page.md", "A request\nwaits for whoever\nis next.", [(2, "whoever")]),
        ("page.md", "Run `whoever` and\n\n    nobody\n", []),
        ("code.py", '"""Ends of which\n\none is told of."""\n', [(1, "of which"), (3, "told of")]),
        ("code.py", "x = 1  # nobody asks\n", [(1, "nobody")]),
        ("code.py", 'x = print("nobody")\n', []),
    ],
)
def test_phrases_are_found_in_prose_alone(
    tmp_path: Path, name: str, text: str, found: list[tuple[int, str]]
) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    assert list(plain_english.in_file(file)) == found


def test_more_phrases_are_refused_and_fewer_ask_for_a_lower_number() -> None:
    places = {"a.py": [(1, "nobody"), (2, "of which")]}
    assert plain_english.wrong(places, {"a.py": 2}) == []
    (more,) = plain_english.wrong(places, {"a.py": 1})
    (fewer,) = plain_english.wrong(places, {"a.py": 3})
    assert "may have 1 and has 2" in more
    assert "--lower" in fewer
