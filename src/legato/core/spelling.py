"""Guesses at what was meant by a name that there is not."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """What to append to a refusal of `name`; empty where nothing known is like it.

    Args:
        likeness: from here on names are alike, between 0 and 1, where they are the same.
    """
    alike = difflib.get_close_matches(name, list(known), cutoff=likeness)
    return f"; did you mean {' or '.join(alike)}?" if alike else ""
