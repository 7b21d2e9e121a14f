"""Makes grammar masks on threads of its own, while the model computes and tokens go out."""

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher

from legato.core.control_groups import usable_cores
from legato.core.worker import Worker
from legato.executor.constraint import Constraint, Masks
from legato.grammar.matcher import STACK_BYTES, raising_no_panic

logger = logging.getLogger(__name__)

_LOW_BY = 10
"""Niceness added to threads that make masks: a step's kernels go first."""


class _Place(NamedTuple):
    """A state of a grammar, and the rows of masks to make from it.

    Attributes:
        first: index of its first row among all masks.
    """

    matcher: LLMatcher
    first: int
    drafts: list[int]


class MaskMaker:
    """Makes the masks of constraints; each constraint has at most one job in flight.

    A job first makes the mask of the next token, which the request needs to go on, then the masks
    after drafts. One call makes the masks of all constraints that become due together. A slow
    constraint has jobs of its own, so that no other constraint waits for it.
    """

    def __init__(self) -> None:
        num_threads = max(1, usable_cores() // 2)
        self._num_threads = num_threads
        self._changed = threading.Condition()
        """Guards all constraints; notified after masks are made."""
        self._quick = Worker(
            "masks", stack_bytes=STACK_BYTES, low_by=_LOW_BY, begin=self._make_executor
        )
        self._slow = Worker(
            "slow masks", num_threads=num_threads, stack_bytes=STACK_BYTES, low_by=_LOW_BY
        )
        self._executor: LLExecutor | None = None

    def want(self, wanted: Iterable[tuple[Constraint, Sequence[int]]]) -> None:
        """Start making masks of next tokens, and of the tokens after drafts."""
        with self._changed:
            constraints: list[Constraint] = []
            for constraint, drafts in wanted:
                constraint.want(drafts)
                constraints.append(constraint)
            self._submit(constraints)

    def wait(self, constraints: Sequence[Constraint], seconds: float, *, is_alone: bool) -> None:
        """Wait at most `seconds` until all wanted masks are made.

        Args:
            is_alone: first wait, without a limit, until one of the requests can go on.
        """

        def have_all() -> bool:
            self._submit(constraints)
            return not any(c.lacks_mask or c.lacks_drafts for c in constraints)

        def have_any() -> bool:
            return have_all() or not all(c.lacks_mask for c in constraints)

        with self._changed:
            if is_alone:
                self._changed.wait_for(have_any)
            self._changed.wait_for(have_all, seconds)

    def advance(self, constraint: Constraint, token_ids: Sequence[int]) -> int:
        """See `Constraint.advance`."""
        with self._changed:
            self._changed.wait_for(lambda: not constraint.is_read)
            return constraint.advance(token_ids)

    def give(self, constraint: Constraint, num_kept: int, token_ids: Sequence[int]) -> None:
        """See `Constraint.give`."""
        with self._changed:  # a mask of the place it leaves may be in the making
            self._changed.wait_for(lambda: not constraint.is_read)
            constraint.give(num_kept, token_ids)

    def close(self, constraint: Constraint) -> None:
        """See `Constraint.close`."""
        with self._changed:
            constraint.close()

    def _submit(self, constraints: Iterable[Constraint]) -> None:
        lacking = [
            c for c in constraints if not c.is_in_flight and (c.lacks_mask or c.lacks_drafts)
        ]
        quick = [constraint for constraint in lacking if not constraint.is_slow]
        if quick:
            self._start(self._quick, quick)
        for constraint in lacking:
            if constraint.is_slow:
                self._start(self._slow, [constraint])

    def _start(self, worker: Worker, constraints: Sequence[Constraint]) -> None:
        worker.submit(self._make, constraints)  # may raise: then no job clears the flags
        for constraint in constraints:
            constraint.is_in_flight = True

    def _make_executor(self) -> None:
        os.environ["RUST_MIN_STACK"] = str(STACK_BYTES)  # of its threads, as nice as this
        self._executor = LLExecutor(self._num_threads)

    def _make(self, constraints: Sequence[Constraint]) -> None:
        started_s = time.perf_counter()
        try:
            self._make_next(constraints)
            self._note_time(constraints, started_s)
            self._make_ahead(constraints)
            self._note_time(constraints, started_s)
        except Exception as error:
            logger.exception("no masks were made")
            with self._changed:
                for constraint in constraints:
                    constraint.fail(error)
        finally:
            with self._changed:
                for constraint in constraints:
                    constraint.is_in_flight = constraint.is_read = False
                self._changed.notify_all()

    def _note_time(self, constraints: Iterable[Constraint], started_s: float) -> None:
        seconds = time.perf_counter() - started_s
        with self._changed:
            for constraint in constraints:
                constraint.mask_s = seconds

    def _make_next(self, wanted: Iterable[Constraint]) -> None:
        """Make the masks of next tokens, which their requests wait for."""
        with self._changed:
            constraints = [c for c in wanted if c.lacks_mask]
            for constraint in constraints:
                constraint.is_read = True
        if not constraints:
            return
        places = [_Place(c.grammar.matcher, i, []) for i, c in enumerate(constraints)]
        masks = _open_masks(len(places), constraints[0].num_words)
        errors = self._fill(places, masks)
        with self._changed:
            for i, constraint in enumerate(constraints):
                constraint.is_read = False
                if i in errors:
                    constraint.fail(errors[i])
                else:
                    constraint.take(masks[i : i + 1])
            self._changed.notify_all()

    def _make_ahead(self, constraints: Iterable[Constraint]) -> None:
        """Make masks after drafts. A request that goes on meanwhile does not use them."""
        wanted: list[tuple[Constraint, int, tuple[int, ...]]] = []
        places: list[_Place] = []
        num_rows = 0
        with self._changed:
            for constraint in constraints:
                if constraint.lacks_drafts and not constraint.lacks_mask:
                    drafts = constraint.drafts
                    places.append(
                        _Place(constraint.copied_matcher(), num_rows, constraint.known_drafts)
                    )
                    wanted.append((constraint, constraint.place, drafts))
                    num_rows += 1 + len(drafts)
        if not places:
            return
        masks = _open_masks(num_rows, wanted[0][0].num_words)
        errors = self._fill(places, masks)
        with self._changed:
            for (constraint, place, drafts), (_, first, _) in zip(wanted, places, strict=True):
                if (constraint.place, constraint.drafts) != (place, drafts):
                    continue
                if first in errors:
                    constraint.want(())  # the request goes on without drafts
                else:
                    constraint.take_ahead(masks[first : first + 1 + len(drafts)])

    def _fill(self, places: Sequence[_Place], masks: Masks) -> dict[int, Exception]:
        """Compute masks in one call; if that fails, each grammar's by itself.

        Returns:
            Errors; key the first row of the grammar that raised.
        """
        try:
            with raising_no_panic():
                self._compute(places, masks)
        except Exception as error:
            if len(places) > 1:
                errors: dict[int, Exception] = {}
                for place in places:
                    errors |= self._fill([place], masks)
                return errors
            logger.exception("the grammar of an output failed")
            return {places[0].first: error}
        return {}

    def _compute(self, places: Sequence[_Place], masks: Masks) -> None:
        row_bytes = masks.shape[1] * masks.itemsize
        plain = [(place.matcher, place.first) for place in places if not place.drafts]
        drafted = [(place.matcher, place.first, place.drafts) for place in places if place.drafts]
        if len(places) == len(plain) == 1:
            [(matcher, first)] = plain
            matcher.unsafe_compute_mask_ptr(masks[first].ctypes.data, row_bytes)
            return
        # One call for many grammars takes the interpreter's lock only once.
        assert self._executor is not None
        where = masks.ctypes.data, row_bytes, len(masks)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)


def _open_masks(num_rows: int, num_words: int) -> Masks:
    """Return masks that forbid nothing: rows after an impossible draft stay so."""
    return np.full((num_rows, num_words), ~np.uint32(0))
