"""Decodes tokens one by one, as the steps of their tokenizer's decoder do within a text."""

import codecs
import json
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer as Backend

_NEIGHBOUR = "a"
_OF_WHOLE_TEXTS = frozenset({"Fuse", "Strip", "ByteFallback"})
"""Steps that leave a token's own text as it is; `ByteFallback` concerns tokens of one byte."""


class TokenDecoder:
    """Decodes single tokens, added ones included, to the bytes that they are in a text.

    Args:
        backend: their tokenizer.
    """

    def __init__(self, backend: Backend) -> None:
        self._decoder = backend.decoder
        steps = _steps(backend)
        kinds = {step["type"] for step in steps}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        replaced = [_replaced(step) for step in steps if step["type"] not in _OF_WHOLE_TEXTS]
        # The decoder does the rest itself, at ten times the cost.
        self._replaced = [pair for pair in replaced if pair is not None]
        self._is_plain = self._decoder is not None and len(self._replaced) == len(replaced)
        self._between = self._text([_NEIGHBOUR, _NEIGHBOUR])[1:]

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes of a token, given as its vocabulary spells it."""
        if self._is_byte_level:
            try:
                return codecs.charmap_encode(token, "strict", _byte_of_letter())[0]
            except UnicodeEncodeError:  # an added token, in letters of its own
                return token.encode()
        if (
            self._has_byte_tokens
            and len(token) == 6
            and token.startswith("<0x")
            and token[5] == ">"
        ):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass
        if not self._is_plain:
            text = self._text([_NEIGHBOUR, token, _NEIGHBOUR])
            return text.removesuffix(self._between)[1:].encode()
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()

    def _text(self, tokens: list[str]) -> str:
        return " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)


def _steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


def _replaced(step: dict[str, Any]) -> tuple[str, str] | None:
    """Return the text that a step replaces and its replacement; None if it does anything else."""
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[int, int]:
    """Return GPT-2's spelling of bytes (Radford et al., 2019): key a letter's code, value its byte.

    Printable Latin-1 characters stand for themselves; letters from U+0100 on, for the other bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    table = {byte: byte for byte in printable}
    return table | {0x100 + index: byte for index, byte in enumerate(others)}
