"""Holds one request to the grammar of its output."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from legato.core.plan import Fault
from legato.grammar.compiled import Grammar, raising_no_panic

Masks = npt.NDArray[np.uint32]
"""[rows, words]: a bit for each token that may come next, that of token 0 the lowest of word 0."""

WORD_BITS = 32
_SLOW_S = 0.005
"""A mask that takes longer is made by itself, and none is made after drafts."""
_DEAD_END = "NoExtensionBias"
"""What llguidance stops by where it finds no token."""


class Constraint:
    """A grammar at the last token of a request that has counted.

    It moves with what counts alone, so that a step that fails leaves no trace in it. Its masks are
    made on another thread: `MaskMaker` guards every call with its lock.

    Args:
        grammar: before the first token.
        end_token_ids: tokens that end the request. One may come wherever the grammar may end.

    Attributes:
        masks: of the next token, and of the tokens after each draft, as far as they are made.
        drafts: the drafts after which masks are wanted.
        place: how often the grammar has moved. Masks of another place are out of date.
        mask_s: how long the last mask took to make, with those made in the same call.
        is_in_flight: whether a thread makes masks, or is about to.
        is_complete: whether nothing may follow.
        fault: why the request cannot go on; None as long as it can.
    """

    def __init__(self, grammar: Grammar, end_token_ids: Iterable[int]) -> None:
        self.grammar = grammar
        self.masks: Masks = self._no_masks
        self.drafts: tuple[int, ...] = ()
        self.place = 0
        self.mask_s = 0.0
        self.is_in_flight = False
        self.is_complete = False
        self.fault: Fault | None = None
        self._end_token_ids = frozenset(t for t in end_token_ids if t < grammar.end)

    @property
    def has_ended(self) -> bool:
        """Whether no token can follow, for one reason or the other."""
        return self.is_complete or self.fault is not None

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return self.grammar.end // WORD_BITS + 1

    @property
    def is_slow(self) -> bool:
        return self.mask_s > _SLOW_S

    @property
    def lacks_mask(self) -> bool:
        """Whether the mask of the next token is to be made."""
        return not self.has_ended and not len(self.masks)

    @property
    def lacks_drafts(self) -> bool:
        """Whether masks after drafts are to be made."""
        return not self.has_ended and not self.is_slow and len(self.masks) <= len(self.drafts)

    @property
    def num_known_rows(self) -> int:
        """How many tokens can be sampled, one after the other."""
        return 0 if self.has_ended else len(self.masks)

    @property
    def known_drafts(self) -> list[int]:
        """Drafts before the first that is no token, which llguidance would take for a fault."""
        return list(itertools.takewhile(lambda token_id: token_id < self.grammar.end, self.drafts))

    def want(self, drafts: Sequence[int]) -> None:
        """Have masks made after these drafts, and no others."""
        if self.drafts != tuple(drafts):
            self.drafts = tuple(drafts)
            self.masks = self.masks[:1]

    def advance(self, token_ids: Sequence[int]) -> int:
        """Move past sampled tokens.

        Returns:
            how many of them count: none after the one that completes the output.
        """
        self.place += 1
        self.masks, self.drafts = self._no_masks, ()
        num_taken = 0
        try:
            with raising_no_panic():
                for token_id in token_ids:
                    num_taken += 1
                    if token_id in self._end_token_ids:
                        break  # it ends the request, and is no part of the output
                    self.grammar.matcher.consume_token(token_id)
                    if self.grammar.matcher.is_stopped():
                        break
                self._look()
        except Exception as error:
            self.fail(error)
        return num_taken

    def take(self, mask: Masks) -> None:
        """Set the mask [1, words] of the next token, which has just been made."""
        self._look()
        self.masks = self._with_ends(mask)

    def take_ahead(self, masks: Masks) -> None:
        """Set the masks [1 + drafts, words] of the next token and of those after drafts."""
        self.masks = self._with_ends(masks)

    def copied_matcher(self) -> LLMatcher:
        """One for drafts, from which the request may move on while masks are made."""
        return self.grammar.copied().matcher

    def fail(self, error: Exception) -> None:
        """End the request: its grammar raised an error."""
        told = f"the output's grammar failed: {type(error).__name__}: {error}"
        self.fault = Fault(told, isinstance(error, MemoryError))

    def close(self) -> None:
        """Make no more masks: the request has ended."""
        self.is_complete = True

    @property
    def _no_masks(self) -> Masks:
        return np.zeros((0, self.num_words), dtype=np.uint32)

    def _with_ends(self, masks: Masks) -> Masks:
        """Masks in which tokens that end the request stand for the grammar's end."""
        word, bit = divmod(self.grammar.end, WORD_BITS)
        for mask in masks:
            if int(mask[word]) >> bit & 1:
                mask[word] &= ~np.uint32(1 << bit)
                for token_id in self._end_token_ids:
                    mask[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
        return masks

    def _look(self) -> None:
        matcher = self.grammar.matcher
        if matcher.is_error():
            self.fault = Fault(_explained(matcher.get_error()), is_asked_for=True)
        else:
            self.is_complete = matcher.is_stopped()


def _explained(error: str) -> str:
    """An error of llguidance in words for clients."""
    if error.startswith(_DEAD_END):
        return "the output's grammar has come to a dead end: no token may follow, nor may it end"
    return f"the output's grammar takes too much to go on: {error}"
