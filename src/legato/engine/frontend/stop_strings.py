"""Finding stop strings in text that comes in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string appears in it; that string is taken out, or kept.

    Only text that may be the beginning of a stop string is held back, so that a stream with stop
    strings is as smooth as one without.

    Attributes:
        matched: the stop string that was found.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool) -> None:
        self._stop = stop
        self._include_in_output = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take a piece of text; returns what can be passed on. Not to be called after a match."""
        text = self._held + text
        # The match that ends first, and of those the longest: what any way of cutting would find.
        found = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text
        ]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end if self._include_in_output else end - len(self.matched)]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        passed = text[: len(text) - num_held]
        self._held = text[len(passed) :]
        return passed

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
