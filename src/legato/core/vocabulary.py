"""The bytes of each token: all that a stream needs of a tokenizer. Imports next to nothing."""

from collections.abc import Iterable

import msgspec

from legato.core.token_ids import TokenIds, token_array


class Vocabulary(msgspec.Struct, frozen=True):
    """The bytes of all tokens.

    Attributes:
        text: bytes of token 0, token 1 and so on, concatenated.
        ends: end of each token's bytes in `text`.
        special_token_ids: tokens that steer the model and are not part of the text.
    """

    text: bytes
    ends: TokenIds
    special_token_ids: frozenset[int]

    @classmethod
    def of(cls, tokens: Iterable[bytes], special_token_ids: frozenset[int]) -> "Vocabulary":
        """Args: tokens: in the order of their ids; empty for an id that is no token."""
        text = bytearray()
        ends = token_array(())
        for token in tokens:
            text += token
            ends.append(len(text))
        return cls(bytes(text), ends, special_token_ids)

    @property
    def num_ids(self) -> int:
        """The largest token id plus one, even if some ids below are no tokens."""
        return len(self.ends)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, empty for an id that is no token.

        A SentencePiece token keeps its leading space, which decoding drops at the start of a text.
        """
        if not 0 <= token_id < len(self.ends):
            return b""
        start = self.ends[token_id - 1] if token_id else 0
        return self.text[start : self.ends[token_id]]
