"""Token ids to text, one token at a time."""

import codecs

from legato.model.tokenizer import Tokenizer

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Gives out whole characters only: the bytes of an unfinished one wait for the next token.

    A token's text does not depend on its neighbours, so each is decoded once and a step costs the
    same at any length. Bytes that can never become a character turn into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = _new_utf8_decoder(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))
