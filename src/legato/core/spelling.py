"""Suggests a known name for an unknown one."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """Return a suggestion to append to a refusal of `name`; empty if no known name is like it.

    Args:
        likeness: least similarity of a suggested name, up to 1 for equal names.
    """
    alike = difflib.get_close_matches(name, list(dict.fromkeys(known)), cutoff=likeness)
    return f"; did you mean {' or '.join(alike)}?" if alike else ""
