"""Which drafts a step holds: those that bring more tokens a second than the step does without.

A drafted row brings a token as often as it and all before it are right; it costs what it makes the
step longer by. Rows are ranked by what they bring, and so many of the first are taken that the step
brings most tokens a second, those of prompts counted like those of streams. So drafts take what a
step has left where it waits for memory anyway, and retreat where prompts or other streams make
better use of it. Where steps are planned ahead, drafts cost a wait, too: how many tokens come of
them is known when their step has landed, and the next is planned only then. Peers fix a number of
drafts, or weigh expected tokens over a profiled step time; here the step must end in time, too,
drafts and all.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from legato.core.config import Speculative
from legato.core.request import Request
from legato.core.step_record import DraftsEndedBy
from legato.scheduler.budget import StepBudget
from legato.scheduler.model_drafting import ModelDrafting
from legato.scheduler.step_builder import StepBuilder
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from legato.speculation.drafter import Draft, Drafter

_MOST_A_STREAM, _FEWEST_A_STREAM = 15, 3
"""Drafts that are looked at of one stream, alone and among many."""
_MOST_ROWS = 96
"""Drafts that are looked at in a step, so that choosing takes no time to speak of."""
_TRIED_AGAIN = 16
"""Steps without drafts after which one is tried that is likely and seems to cost too much, and
twice as many each time that it still does."""
_LIKELY = 0.5
_GAIN = 1.03
"""By how much more tokens a second drafts are to promise than a step without any. They are chosen
where they look best, and so look better than they are."""
_HOPELESS = 0.02
"""Chance of coming below which a row is not looked at."""
_NEWS = 0.1
"""What the last turnaround counts for, beside all before it."""


class _Row(NamedTuple):
    """A draft and what it brings.

    Attributes:
        chance: of it to be right, and all before it.
        place: of its stream among those of the step.
        depth: drafts of the stream before it.
    """

    chance: float
    place: int
    depth: int


class Drafting:
    """Asks drafters what may come next, and puts what is worth it into steps.

    Args:
        speculative: as in `SchedulerConfig`.
        most_samples: rows of a step that may be sampled.
        model: asks a draft model; None where there is none.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        speculative: Speculative,
        budget: StepBudget,
        step_time: StepTimeModel,
        most_samples: int,
        model: ModelDrafting | None = None,
    ) -> None:
        self._drafters = drafters
        self._speculative = speculative
        self._budget = budget
        self._step_time = step_time
        self._most_samples = most_samples
        self._model = model
        self._num_without = 0  # steps since the last with drafts that could have had likely ones
        self._patience = _TRIED_AGAIN
        self._turnaround_s = 0.0

    def note_turnaround(self, seconds: float) -> None:
        """See `Scheduler.note_turnaround`."""
        self._turnaround_s += _NEWS * (seconds - self._turnaround_s)

    def advance(self, request: Request) -> None:
        """Tell the drafters of tokens that have come."""
        for drafter in self._drafters:
            drafter.advance(request)
        if self._model is not None:
            self._model.advance(request)

    def add(self, step: StepBuilder) -> DraftsEndedBy | None:
        """Put drafts behind the step's streams; returns why there are no more of them."""
        streams = step.drafting_streams
        if not streams:
            return None
        most = [self._most(request, len(streams)) for request in streams]
        drafts = [self._best(request, count) for request, count in zip(streams, most, strict=True)]
        if self._model is not None:
            counts, _ = self._counts(step, streams, drafts, may_try=False)
            self._model.improve(
                step, streams, drafts, counts, most=most, most_rows=self._most_rows(step)
            )
        counts, ended_by = self._counts(step, streams, drafts)
        has_all = [
            step.draft(request, draft, num_drafts)
            for request, draft, num_drafts in zip(streams, drafts, counts, strict=True)
            if draft is not None and num_drafts
        ]
        return ended_by if all(has_all) else "memory"

    def _counts(
        self,
        step: StepBuilder,
        streams: Sequence[Request],
        drafts: Sequence[Draft | None],
        *,
        may_try: bool = True,
    ) -> tuple[list[int], DraftsEndedBy]:
        """Tokens of each draft that are taken, and why no more.

        Args:
            may_try: whether one may be, to see what it costs.
        """
        rows = _ranked(drafts)
        count, ended_by = self._worth(step, streams, rows, may_try=may_try)
        counts = [0] * len(streams)
        for row in rows[:count]:
            counts[row.place] += 1
        return counts, ended_by

    def _most_rows(self, step: StepBuilder) -> int:
        # With settings that let fewer run, those that do may be too many already.
        most = min(_MOST_ROWS, max(0, self._most_samples - step.shape.num_samples))
        return min(most, self._step_time.most_drafts) if self._speculative == "auto" else most

    def _most(self, request: Request, num_streams: int) -> int:
        if self._speculative != "auto":
            most = int(self._speculative)
        else:
            most = max(_FEWEST_A_STREAM, min(_MOST_A_STREAM, _MOST_ROWS // num_streams))
        # Its chunk must end before its last token, and it has its next already.
        return min(most, request.num_final_tokens - request.num_expected_tokens)

    def _best(self, request: Request, most: int) -> Draft | None:
        """What brings most tokens of all that is proposed."""
        if most <= 0:
            return None
        num_unknown = request.num_expected_tokens - 1 - request.num_tokens  # tokens in flight
        proposed = [drafter.propose(request, num_unknown + most) for drafter in self._drafters]
        return max(
            (_behind(draft, num_unknown) for draft in proposed if draft is not None),
            key=lambda draft: sum(draft.survival),
            default=None,
        )

    def _worth(
        self, step: StepBuilder, streams: Sequence[Request], rows: Sequence[_Row], *, may_try: bool
    ) -> tuple[int, DraftsEndedBy]:
        """How many of the rows are taken, and why no more."""
        count = most = min(len(rows), self._most_rows(step))
        if self._speculative == "auto":
            count = self._best_count(step, streams, rows[:most])
            if may_try and self._is_tried_again(rows[:most], count):
                count = 1
        drafted = step.shape.copy()
        for num_fitting, row in enumerate(rows[:count]):
            _add(drafted, streams, row)
            bound = self._budget.drafts_bound(drafted, step.limit_s)
            if bound is not None:
                return num_fitting, bound
        return count, "proposals" if count == len(rows) else "worth"

    def _is_tried_again(self, rows: Sequence[_Row], count: int) -> bool:
        """Whether a draft is computed to see what it costs: it may have been dear by chance."""
        if count:
            self._num_without, self._patience = 0, _TRIED_AGAIN
        elif rows and rows[0].chance > _LIKELY:
            self._num_without += 1
        if self._num_without <= self._patience:
            return False
        self._num_without, self._patience = 0, 2 * self._patience
        return True

    def _best_count(
        self, step: StepBuilder, streams: Sequence[Request], rows: Sequence[_Row]
    ) -> int:
        """With which the step, and what drafting took before it, brings most tokens a second."""
        if not (rows and self._step_time.is_known):
            return 0
        shape, tokens = step.shape, float(step.shape.num_tokens)
        best, without_s = 0, step.drafting_s + self._step_time.seconds(shape)
        best_rate = _GAIN * tokens / without_s
        # Where others' values are needed, nothing is planned ahead anyway.
        waits_anyway = any(stream.params.needs_values for stream in streams)
        wait_s = step.drafting_s + (0.0 if waits_anyway else self._turnaround_s)
        drafted = shape.copy()
        for count, row in enumerate(rows, 1):
            _add(drafted, streams, row)
            tokens += row.chance
            rate = tokens / (self._step_time.seconds(drafted) + wait_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best


def _behind(draft: Draft, count: int) -> Draft:
    """What follows its first `count` tokens, which are guesses of tokens in flight."""
    chances = draft.chances[count:]
    if count and chances:
        chances = [math.prod(draft.chances[: count + 1]), *chances[1:]]
    return draft._replace(token_ids=draft.token_ids[count:], chances=chances)


def _ranked(drafts: Sequence[Draft | None]) -> list[_Row]:
    """The likeliest first: each comes behind those that it needs."""
    rows = [
        _Row(survival, place, depth)
        for place, draft in enumerate(drafts)
        if draft is not None
        for depth, survival in enumerate(draft.survival)
        if survival > _HOPELESS
    ]
    rows.sort(key=lambda row: -row.chance)
    return rows[:_MOST_ROWS]


def _add(shape: StepShape, streams: Sequence[Request], row: _Row) -> None:
    context = streams[row.place].num_expected_tokens - 1
    shape.add_drafts(context + row.depth, 1)
