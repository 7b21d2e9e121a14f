"""Which files a request crosses is pinned: a new one on its way must pay for its room."""

from functools import cache
from pathlib import Path

import pytest
from scripts.crossings import REQUESTS, Crossing, crossings

LETTERS = dict(zip("csrm", REQUESTS, strict=True))
PINNED = Path(__file__).with_name("crossed_files.txt")
"""A file of the rooms that belong to requests, and the letters of the requests that cross it."""
NUM_COMPILED = {"chat": 0, "chat with schema and tool": 2, "responses": 0, "messages": 0}


@cache
def crossed() -> dict[str, Crossing]:
    return crossings()


@pytest.mark.parametrize("letter", LETTERS)
def test_a_request_crosses_the_files_that_are_pinned(letter: str) -> None:
    rows = (line.split() for line in PINNED.read_text().splitlines())
    pinned = {path for path, letters in rows if letter in letters}
    found = set(crossed()[LETTERS[letter]].own_files)
    assert not found - pinned, "new on the way"
    assert not pinned - found, "no longer on the way: take them out of the list"


def test_grammars_are_compiled_as_often_as_pinned() -> None:
    assert {name: crossing.num_compiled for name, crossing in crossed().items()} == NUM_COMPILED
