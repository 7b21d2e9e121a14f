"""Converts a vocabulary for llguidance."""

from llguidance import LLTokenizer, TokenizerWrapper

from legato.core.vocabulary import Vocabulary

_END = b"<end of output>"


class _Tokens:
    """The object that `TokenizerWrapper` wraps.

    Its end is a token of its own after all others: in a mask it says that the output may end, with
    any of the request's end tokens.
    """

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int]) -> None:
        self.tokens = [*tokens, _END]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*special_token_ids, self.eos_token_id]
        self._ids: dict[bytes, int] = {}
        self._most_bytes = 0

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize a text, longest tokens first; called only by grammars that force texts."""
        if not self._ids:
            self._ids = {token: token_id for token_id, token in enumerate(self.tokens) if token}
            self._most_bytes = max(map(len, self._ids))
        token_ids: list[int] = []
        while text:
            pieces = (text[:size] for size in range(self._most_bytes, 0, -1))
            piece = next((piece for piece in pieces if piece in self._ids), None)
            if piece is None:
                break
            token_ids.append(self._ids[piece])
            text = text[len(piece) :]
        return token_ids


def grammar_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Return a tokenizer of all tokens, by the bytes that they add to a text.

    This takes 0.1 s for 50 000 tokens, during which no other Python thread runs.
    """
    tokens = [vocabulary.token_bytes(token_id) for token_id in range(vocabulary.num_ids)]
    return _tokenizer(tokens, vocabulary)


def small_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Return a tokenizer of the same size; only single bytes and special tokens have texts.

    It takes a tenth of the time, and does not change whether a grammar compiles.
    """
    tokens = [b""] * vocabulary.num_ids
    for token_id in range(vocabulary.num_ids):
        token = vocabulary.token_bytes(token_id)
        if len(token) == 1 or token_id in vocabulary.special_token_ids:
            tokens[token_id] = token
    return _tokenizer(tokens, vocabulary)


def special_token_texts(vocabulary: Vocabulary) -> list[str]:
    """Return the texts of special tokens that a grammar can name."""
    texts = [vocabulary.token_bytes(token_id) for token_id in vocabulary.special_token_ids]
    return [text.decode() for text in texts if text.startswith(b"<") and text.endswith(b">")]


def _tokenizer(tokens: list[bytes], vocabulary: Vocabulary) -> LLTokenizer:
    wrapped = TokenizerWrapper(_Tokens(tokens, sorted(vocabulary.special_token_ids)))
    # Without slices: they would take 0.05 s more, and make masks hardly faster.
    return LLTokenizer(wrapped, slices=[])
