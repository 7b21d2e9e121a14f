"""Texts in llguidance's Lark, in which special tokens are no characters."""

import json
import re
from collections.abc import Mapping

ANY_TEXT = "/(?s:.*)/"


class LarkText:
    """Writes texts as parts of rules.

    Args:
        special: key a special token's text, value its id. Text cannot match a special token.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        names = sorted(special, key=len, reverse=True)
        self._names = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def literal(self, text: str) -> str:
        """Return a text as literals and the special tokens in it."""
        return " ".join(map(self._piece, self._pieces(text))) or '""'

    def until(self, rule: str, mark: str, text: str = ANY_TEXT) -> list[str]:
        """Return the rules for a text, up to a mark and with it.

        Args:
            rule: the first one's name.
            text: a pattern of the text.
        """
        first, *others = self._pieces(mark)
        if first in self._special:
            return [f"{rule}: {text} {self.literal(mark)}"]
        if not others:
            return [f"{rule}[lazy]: {text} {self._piece(first)}"]
        # The special token in the mark ends the terminal, which needs not be lazy.
        terminal = rule.upper()
        rest = " ".join(map(self._piece, others))
        return [f"{rule}: {terminal} {rest}", f"{terminal}: {text} {self._piece(first)}"]

    def _pieces(self, text: str) -> list[str]:
        return list(filter(None, self._names.split(text) if self._names else [text]))

    def _piece(self, piece: str) -> str:
        if piece in self._special:
            return f"<[{self._special[piece]}]>"
        return json.dumps(piece, ensure_ascii=False)
