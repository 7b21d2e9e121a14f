"""Makes masks on a thread of its own, while tokens go out, others come and the model computes."""

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor

from legato.core.priority import lower_this_thread
from legato.executor.constraint import Constraint

_LOW_BY = 10
"""Threads that make masks are this much nicer: those of a step's kernels go first."""

Wanted = tuple[Constraint, Sequence[int]]
"""Of whom masks are wanted, and drafts of the tokens that follow."""


class MaskThread:
    """Takes one batch after the other. No matcher has moved when its masks are made."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "masks", initializer=self._begin_thread)
        self._executor: LLExecutor | None = None

    def begin(self, wanted: Sequence[Wanted]) -> None:
        """Have masks made; each constraint's `ready` tells when it has its own."""
        if wanted:
            ready = self._thread.submit(self._make, wanted)
            for constraint, _ in wanted:
                constraint.ready = ready

    def _begin_thread(self) -> None:
        lower_this_thread(_LOW_BY)
        self._executor = LLExecutor(max(1, (os.cpu_count() or 1) // 2))  # its threads are as nice

    def _make(self, wanted: Sequence[Wanted]) -> None:
        assert self._executor is not None
        num_words = wanted[0][0].num_words
        firsts = np.cumsum([0, *(1 + len(drafts) for _, drafts in wanted)]).tolist()
        masks = np.full((firsts[-1], num_words), ~np.uint32(0))  # behind a draft that cannot come
        where = masks.ctypes.data, num_words * masks.itemsize, len(masks)
        placed = [
            (constraint.grammar.matcher, first, list(_tokens(drafts, constraint.grammar.end)))
            for (constraint, drafts), first in zip(wanted, firsts, strict=False)
        ]
        guessing = [place for place in placed if place[2]]
        # One call for many: it takes the interpreter's lock but once.
        self._executor.unsafe_compute_mask_ptr([place[:2] for place in placed], *where)
        if guessing:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(guessing, *where)
        for (constraint, drafts), first in zip(wanted, firsts, strict=False):
            constraint.take(masks[first : first + 1 + len(drafts)])


def _tokens(drafts: Sequence[int], end: int) -> Iterator[int]:
    """Those before the first that is no token, which llguidance would take for a fault."""
    return itertools.takewhile(lambda token_id: token_id < end, drafts)
