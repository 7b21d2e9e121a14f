"""Turns tokens into text to pass on: whole characters, without stop strings."""

import codecs
from collections.abc import Iterable, Sequence

from legato.core.vocabulary import Vocabulary


class Detokenizer:
    """Decodes tokens to whole characters; bytes of an incomplete one wait for the next token.

    A token's text does not depend on its neighbours, so each is decoded once and a step costs the
    same at any length. Bytes that can never become a character turn into U+FFFD.

    Args:
        kept: ids of special tokens that are not skipped.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, skip_special_tokens: bool, kept: Iterable[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._skipped: frozenset[int] = frozenset()
        if skip_special_tokens:
            self._skipped = vocabulary.special_token_ids.difference(kept)
        self._rest = b""  # bytes of an incomplete character

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        if token_id in self._skipped:
            return ""
        data = self._rest + self._vocabulary.token_bytes(token_id)
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[num_decoded:]
        return text


class StopStrings:
    """Passes text on until a stop string; removes the string, or keeps it.

    Only text that may begin a stop string is held back, so that a stream with stop strings is as
    smooth as one without.

    Attributes:
        matched: the stop string that was found.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool) -> None:
        self._stop = stop
        self._include_in_output = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add a piece of text; return the text to pass on. Must not be called after a match."""
        if not self._stop:
            return text
        text = self._held + text
        # Take the match that ends first, and of those the longest, so that pieces do not matter.
        found = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text
        ]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end if self._include_in_output else end - len(self.matched)]
        num_held = max((overlap(text, stop) for stop in self._stop), default=0)
        passed = text[: len(text) - num_held]
        self._held = text[len(passed) :]
        return passed

    def flush(self) -> str:
        """Return the text held back, after the last piece."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
