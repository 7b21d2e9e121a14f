"""Holds one request to the grammar of its output."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from legato.grammar.compiled import Grammar

Masks = npt.NDArray[np.uint32]
"""[rows, words]: a bit for each token that may come next, that of token 0 the lowest of word 0."""

WORD_BITS = 32
_DEAD_END = "NoExtensionBias"
"""What llguidance stops by where it finds no token."""


class Constraint:
    """A grammar at the last token of a request that has counted.

    It moves with what counts alone, so that a step that fails leaves no trace in it.

    Args:
        grammar: before the first token.
        end_token_ids: of which one may come wherever the grammar may end.

    Attributes:
        is_complete: whether nothing may follow.
        error: why nothing more can be said, "" as long as it can.
        ready: done once `masks` are those of the next token, and behind it of each draft.
    """

    def __init__(self, grammar: Grammar, end_token_ids: Iterable[int]) -> None:
        self.grammar = grammar
        self.is_complete = False
        self.error = ""
        self.ready: Future[None] = Future()
        self.masks: Masks = np.zeros((0, 0), dtype=np.uint32)
        self._end_token_ids = frozenset(t for t in end_token_ids if t < grammar.end)

    @property
    def has_ended(self) -> bool:
        """Whether no token can follow, for one reason or the other."""
        return self.is_complete or bool(self.error)

    @property
    def num_words(self) -> int:
        """Of a mask."""
        return self.grammar.end // WORD_BITS + 1

    def advance(self, token_ids: Sequence[int]) -> int:
        """Go on behind sampled tokens.

        Returns:
            how many of them count: none behind the one that completes the output.
        """
        matcher, num_taken = self.grammar.matcher, 0
        for token_id in token_ids:
            num_taken += 1
            if token_id in self._end_token_ids:
                break  # it ends the request, and is no part of the output
            matcher.consume_token(token_id)
            if matcher.is_stopped():
                break
        self._look()
        return num_taken

    def take(self, masks: Masks) -> None:
        """Have masks, in which the grammar's end becomes what ends the request."""
        self._look()
        word, bit = divmod(self.grammar.end, WORD_BITS)
        for mask in masks:
            if int(mask[word]) >> bit & 1:
                mask[word] &= ~np.uint32(1 << bit)
                for token_id in self._end_token_ids:
                    mask[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
        self.masks = masks

    def _look(self) -> None:
        matcher = self.grammar.matcher
        if matcher.is_error():
            self.error = _told(matcher.get_error())
        else:
            self.is_complete = matcher.is_stopped()


def _told(error: str) -> str:
    """What llguidance says, in words of those who asked."""
    if error.startswith(_DEAD_END):
        return "the output's grammar has come to a dead end: no token may follow, nor may it end"
    return f"the output's grammar takes too much to go on: {error}"
