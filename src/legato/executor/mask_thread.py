"""Makes masks on a thread of its own, while tokens go out, others come and the model computes."""

import itertools
import os
from collections.abc import Iterator, Sequence

import numpy as np
from llguidance import LLExecutor

from legato.core.worker import Worker
from legato.executor.constraint import Constraint
from legato.grammar.compiled import STACK_BYTES

_LOW_BY = 10
"""Threads that make masks are this much nicer: those of a step's kernels go first."""

Wanted = tuple[Constraint, Sequence[int]]
"""Of whom masks are wanted, and drafts of the tokens that follow."""


class MaskThread:
    """Takes one batch after the other. No matcher has moved when its masks are made."""

    def __init__(self) -> None:
        self._worker = Worker(
            "masks", stack_bytes=STACK_BYTES, low_by=_LOW_BY, begin=self._make_executor
        )
        self._executor: LLExecutor | None = None

    def begin(self, wanted: Sequence[Wanted]) -> None:
        """Have masks made; each constraint's `ready` tells when it has its own."""
        if wanted:
            ready = self._worker.submit(self._make, wanted)
            for constraint, _ in wanted:
                constraint.ready = ready

    def _make_executor(self) -> None:
        os.environ["RUST_MIN_STACK"] = str(STACK_BYTES)  # of its threads, which are as nice
        self._executor = LLExecutor(max(1, (os.cpu_count() or 1) // 2))

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
        try:
            # One call for many: it takes the interpreter's lock but once.
            self._executor.unsafe_compute_mask_ptr([place[:2] for place in placed], *where)
            if guessing:
                self._executor.unsafe_compute_mask_ptr_with_draft_token(guessing, *where)
        except BaseException as error:  # a panic of Rust's is no `Exception`
            raise RuntimeError(f"no masks: {type(error).__name__}: {error}") from error
        for (constraint, drafts), first in zip(wanted, firsts, strict=False):
            constraint.take(masks[first : first + 1 + len(drafts)])


def _tokens(drafts: Sequence[int], end: int) -> Iterator[int]:
    """Those before the first that is no token, which llguidance would take for a fault."""
    return itertools.takewhile(lambda token_id: token_id < end, drafts)
