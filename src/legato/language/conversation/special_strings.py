"""Finds special tokens in texts that must not contain them."""

import re
from collections.abc import Collection, Iterable, Iterator

SEPARATOR = "\0"
_NEVER = r"(?!)"
_MAX_CHARS = 64
"""Longer strings are found by their beginning, which keeps the pattern small."""


class SpecialStrings:
    """A set of special strings.

    Args:
        strings: special strings, of at least one character each.
        others: all other strings that are whole tokens; one that contains a special string is read
            as the longer token.
    """

    def __init__(self, strings: Iterable[str], others: Iterable[str] = ()) -> None:
        self._strings = frozenset(text[:_MAX_CHARS] for text in strings if text.strip())
        whole = _pattern(self._strings) or _NEVER
        self._others = frozenset(filter(re.compile(whole).search, others)) - self._strings
        self._pattern = re.compile(_pattern(self._strings | self._others) or _NEVER)
        beginnings = {
            text[:end]
            for text in self._strings
            for end in range(1, len(text))
            if text[:end].strip()
        }
        self._beginning = re.compile(rf"(?:{_pattern(beginnings) or _NEVER})\Z")
        self._firsts = {text[0] for text in self._strings}
        ending = rf"(?:{_pattern(beginnings) or _NEVER})\s*(?:{SEPARATOR}|\Z)"
        self._any_place = re.compile(f"{whole}|{ending}")

    def may_be_in(self, joined: str) -> bool:
        """Whether `places` would find any in many texts; far faster than searching each.

        Args:
            joined: the texts, with `SEPARATOR` between them.
        """
        has_first = any(first in joined for first in self._firsts)  # few texts have one
        return has_first and self._any_place.search(joined) is not None

    def first(self, text: str) -> str | None:
        """Return the first special string in a text."""
        found = next(self._found(text), None)
        return found and found[0]

    def places(self, text: str) -> list[int]:
        """Return indices of characters to replace so that no special string begins in a text.

        A special string cut off by the end of the text counts too: the next text may complete it.
        """
        if not any(first in text for first in self._firsts):
            return []
        places = {found.start() + _num_blanks(found[0]) for found in self._found(text)}
        ending = text.rstrip()
        skipped = max(0, len(ending) - _MAX_CHARS)
        found = self._beginning.search(ending, skipped)
        while found is not None:
            places.add(found.start() + _num_blanks(found[0]))
            found = self._beginning.search(ending, found.start() + 1)
        return sorted(places)

    def _found(self, text: str) -> Iterator[re.Match[str]]:
        """Yield all special strings, which may overlap."""
        found = self._pattern.search(text)
        while found is not None:
            is_other = found[0] in self._others
            if not is_other:
                yield found
            found = self._pattern.search(text, found.end() if is_other else found.start() + 1)


def _num_blanks(text: str) -> int:
    """Return the number of blanks at the start of a text."""
    return len(text) - len(text.lstrip())


def _pattern(strings: Collection[str]) -> str:
    """Return a pattern that matches the longest of the strings and reads each character once."""
    rests: dict[str, list[str]] = {}  # key the first character
    for text in filter(None, strings):
        rests.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(first) + _pattern(rest) for first, rest in sorted(rests.items())]
    is_whole = len(branches) == 1 and "" not in strings
    if is_whole or not branches:
        return "".join(branches)
    return f"(?:{'|'.join(branches)})" + ("?" if "" in strings else "")
