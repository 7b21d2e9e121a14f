"""Guesses at what was meant by a name that there is not."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What to append to a refusal of `name`; empty where nothing known is like it."""
    alike = difflib.get_close_matches(name, list(known))
    return f"; did you mean {' or '.join(alike)}?" if alike else ""
