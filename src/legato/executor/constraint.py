"""Constrains one request's output to its grammar."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from legato.core.plan import Fault
from legato.grammar.matcher import Grammar, raising_no_panic

Masks = npt.NDArray[np.uint32]
"""[rows, words]: a bit for each token that may come next; token 0 is the lowest bit of word 0."""

WORD_BITS = 32
_SLOW_S = 0.005
"""A grammar with a slower mask gets calls of its own, and no masks after drafts."""
_DEAD_END = "NoExtensionBias"
"""The reason with which llguidance stops if no token is possible."""


class Constraint:
    """A grammar's state after the last committed token of a request.

    Only committed tokens move it, so a failed step leaves no trace. A worker thread makes its
    masks: `MaskMaker` guards every call with its lock.

    Args:
        grammar: in its state before the first token.
        end_token_ids: tokens that end the request, allowed wherever the grammar may end.

    Attributes:
        masks: for the next token and for the token after each draft, as far as they are made.
        drafts: the drafts after which masks are wanted.
        place: how often the grammar has moved. Masks made at another place are out of date.
        mask_s: seconds of the last call that made a mask, all masks of the call included.
        is_in_flight: whether a worker makes masks, or has a job to do so.
        is_read: whether a worker reads the grammar itself, which must not move meanwhile.
        is_complete: whether no token may follow.
        fault: why the request cannot go on; None while it can.
    """

    def __init__(self, grammar: Grammar, end_token_ids: Iterable[int]) -> None:
        self.grammar = grammar
        self.masks: Masks = self._no_masks
        self.drafts: tuple[int, ...] = ()
        self.place = 0
        self.mask_s = 0.0
        self.is_in_flight = False
        self.is_read = False
        self.is_complete = False
        self.fault: Fault | None = None
        self._end_token_ids = frozenset(t for t in end_token_ids if t < grammar.end)
        self._num_consumed = 0  # tokens that the grammar has moved past

    @property
    def has_ended(self) -> bool:
        """Whether no token can follow: the output is complete, or the request has a fault."""
        return self.is_complete or self.fault is not None

    @property
    def num_words(self) -> int:
        """Length of a mask in words."""
        return self.grammar.end // WORD_BITS + 1

    @property
    def is_slow(self) -> bool:
        return self.mask_s > _SLOW_S

    @property
    def lacks_mask(self) -> bool:
        """Whether the mask of the next token must still be made."""
        return not self.has_ended and not len(self.masks)

    @property
    def lacks_drafts(self) -> bool:
        """Whether masks after drafts must still be made."""
        return not self.has_ended and not self.is_slow and len(self.masks) <= len(self.drafts)

    @property
    def num_known_rows(self) -> int:
        """Rows that can be sampled: those with a mask."""
        return 0 if self.has_ended else len(self.masks)

    @property
    def known_drafts(self) -> list[int]:
        """Drafts up to the first id that is no token, which llguidance would report as a fault."""
        return list(itertools.takewhile(lambda token_id: token_id < self.grammar.end, self.drafts))

    def want(self, drafts: Sequence[int]) -> None:
        """Request masks after these drafts and no others."""
        if self.drafts != tuple(drafts):
            self.drafts = tuple(drafts)
            self.masks = self.masks[:1]

    def advance(self, token_ids: Sequence[int]) -> int:
        """Move the grammar past sampled tokens.

        Returns:
            Number of tokens that count: those up to the one that completes the output.
        """
        self.place += 1
        self.masks, self.drafts = self._no_masks, ()
        num_taken = 0
        try:
            with raising_no_panic():
                for token_id in token_ids:
                    num_taken += 1
                    if token_id in self._end_token_ids:
                        break  # the end token is no part of the output
                    self.grammar.matcher.consume_token(token_id)
                    self._num_consumed += 1
                    if self.grammar.matcher.is_stopped():
                        break
                self._look()
        except Exception as error:
            self.fail(error)
        return num_taken

    def give(self, num_kept: int, token_ids: Sequence[int]) -> None:
        """Move the grammar past given tokens, instead of the sampled ones after the first.

        Args:
            num_kept: sampled tokens that stay.
        """
        try:
            with raising_no_panic():
                self.grammar.matcher.rollback(max(0, self._num_consumed - num_kept))
        except Exception as error:
            self.fail(error)
        self._num_consumed = min(self._num_consumed, num_kept)
        self.is_complete = False
        self.advance(token_ids)

    def take(self, mask: Masks) -> None:
        """Set the new mask [1, words] of the next token, unless the request has ended meanwhile."""
        if self.has_ended:
            return
        self._look()
        self.masks = self._with_ends(mask)

    def take_ahead(self, masks: Masks) -> None:
        """Set the masks [1 + drafts, words] of the next token and of the tokens after drafts."""
        self.masks = self._with_ends(masks)

    def copied_matcher(self) -> LLMatcher:
        """Return a copy for drafts, so that the request may move on while masks are made."""
        return self.grammar.copied().matcher

    def fail(self, error: Exception) -> None:
        """End the request because its grammar raised an error."""
        told = f"the output's grammar failed: {type(error).__name__}: {error}"
        self.fault = Fault(told, isinstance(error, MemoryError))

    def close(self) -> None:
        """Stop making masks: the request has ended."""
        self.is_complete = True

    @property
    def _no_masks(self) -> Masks:
        return np.zeros((0, self.num_words), dtype=np.uint32)

    def _with_ends(self, masks: Masks) -> Masks:
        """Replace the bit of the grammar's end by the bits of tokens that end the request."""
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
    """Put an error of llguidance in words for clients."""
    if error.startswith(_DEAD_END):
        return "the output's grammar has come to a dead end: no token may follow, nor may it end"
    return f"the output's grammar takes too much to go on: {error}"
