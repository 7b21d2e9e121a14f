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

    def until(self, rule: str, mark: str, text: str = ANY_TEXT, *, without: str = "") -> list[str]:
        """Return the rules for a text, up to a mark and with it.

        Args:
            rule: the first one's name.
            text: a pattern of the text.
            without: what the text must not contain, if the mark alone does not see to that.
        """
        first, *others = self._pieces(mark)
        is_special = first in self._special
        if without == mark and not is_special:  # a text that is lazy ends at the first
            without = ""
        terminal = text if is_special else f"{text} {self._piece(first)}"
        made = []
        if without:
            # The mark may end with this text, which no more of the terminal may follow.
            more = "" if is_special else "(?s:.+)"
            terminal = f"({terminal}) & ~/(?s:.*){_regex(without)}{more}(?s:.*)/"
        if without or (others and not is_special):
            made, terminal = [f"{rule.upper()}: {terminal}"], rule.upper()
        if is_special:
            return [f"{rule}: {terminal} {self.literal(mark)}", *made]
        # A special token in the mark ends the terminal, which then needs not be lazy.
        rest = " ".join(map(self._piece, others))
        return [f"{rule}{'' if others else '[lazy]'}: {terminal} {rest}".rstrip(), *made]

    def _pieces(self, text: str) -> list[str]:
        return list(filter(None, self._names.split(text) if self._names else [text]))

    def _piece(self, piece: str) -> str:
        if piece in self._special:
            return f"<[{self._special[piece]}]>"
        return json.dumps(piece, ensure_ascii=False)


def _regex(text: str) -> str:
    return re.sub(r"[!-/:;=?@\[-^`{-~]", lambda found: f"\\{found[0]}", text)
