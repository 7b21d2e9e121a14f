"""Pages, docstrings and comments use plain English."""

from pathlib import Path

import pytest
from scripts import plain_english


def test_no_listed_phrase_is_used() -> None:
    assert plain_english.phrases() == []


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
