"""Chooses the drafts that raise the tokens per second of a step.

A drafted row yields a token if it and all drafts before it are right. Its cost is the time that it
adds to the step. Rows are ranked by their chance, and the step takes as many of the first as give
most tokens per second; prompt tokens count like stream tokens. So drafts use up a step that waits
for memory anyway, and retreat when prompts or other streams use it better. When steps are planned
ahead, drafts also cost a wait: the number of accepted drafts is known when their step has landed,
and the next step is planned only then. Peers fix a number of drafts, or weigh expected tokens
against a profiled step time. Here the step must also end in time with its drafts, and no stream may
wait longer for its tokens because others draft: a stream's expected time per token, which is the
step's time over the tokens that the stream expects of it, stays within a slack of what it is
without drafts.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from legato.core.config import SchedulerConfig
from legato.core.request import Request
from legato.core.step_record import DraftsEndedBy
from legato.scheduler.budget import StepBudget
from legato.scheduler.decodes import Decodes
from legato.scheduler.expected_ends import OutputLengths
from legato.scheduler.expected_tokens import ExpectedTokens
from legato.scheduler.model_drafting import ModelDrafting
from legato.scheduler.step import Step
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from legato.speculation.drafter import CostlyDrafter, Draft, Drafter

_MOST_A_STREAM, _FEWEST_A_STREAM = 15, 3
"""Most drafts considered for one stream: running alone, and among many."""
_MOST_ROWS = 96
"""Most drafts considered in a step, so that choosing takes negligible time."""
_TRIED_AGAIN = 16
"""Steps without drafts before a likely draft is tried that seems too costly. The number doubles
each time that it still is."""
_LIKELY = 0.5
_GAIN = 1.03
"""Factor by which drafts must raise a step's expected tokens per second. The best estimates are
chosen, so the chosen ones are too high."""
_HOPELESS = 0.02
"""Chance of being right below which a row is not considered."""
_NEWS = 0.1
"""Weight of the last turnaround in the running mean."""


class _Row(NamedTuple):
    """A drafted token.

    Attributes:
        chance: that it and all drafts before it are right.
        place: index of its stream in the step.
        depth: number of the stream's drafts before it.
    """

    chance: float
    place: int
    depth: int


class Drafting:
    """Asks drafters for drafts and adds the worthwhile ones to steps.

    Args:
        config: resolved.
        model: asks the draft model; None if there is no draft model.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        config: SchedulerConfig,
        budget: StepBudget,
        step_time: StepTimeModel,
        model: ModelDrafting | None = None,
    ) -> None:
        self._drafters = drafters
        self._speculative = config.speculative
        self._slack = config.speculative_slack
        self._budget = budget
        self._step_time = step_time
        self._most_samples = config.most_samples
        self._model = model
        self._num_without = 0  # steps with a likely draft, none taken since
        self._patience = _TRIED_AGAIN
        self._exploration = _Exploration()
        self._turnaround_s = 0.0

    def record_turnaround(self, seconds: float) -> None:
        """See `Scheduler.record_turnaround`."""
        self._turnaround_s += _NEWS * (seconds - self._turnaround_s)

    def advance(self, request: Request) -> None:
        """Pass a request's new tokens to the drafters."""
        for drafter in self._drafters:
            drafter.advance(request)
        if self._model is not None:
            self._model.advance(request)

    def add(self, step: Step, decodes: Decodes) -> DraftsEndedBy | None:
        """Add drafts to the streams of a step; return the limit on their number."""
        streams = decodes.drafting(step)
        if not streams:
            return None
        if not self._drafters and self._model is None:
            return "proposals"
        most = [self._most(request, len(streams)) for request in streams]
        drafts = [self._best(request, count) for request, count in zip(streams, most, strict=True)]
        explores = self._exploration.is_due(self._step_time.most_drafts, len(streams))
        slack = math.inf if explores else self._slack
        if self._model is not None:
            counts, _ = self._counts(step, streams, drafts, slack, may_try=False)
            most_rows = self._most_rows(step)
            self._model.improve(
                step, streams, drafts, counts, slack, most=most, most_rows=most_rows
            )
        counts, ended_by = self._counts(step, streams, drafts, slack)
        has_all = [
            step.add_drafts(request, draft, num_drafts)
            for request, draft, num_drafts in zip(streams, drafts, counts, strict=True)
            if draft is not None and num_drafts
        ]
        return ended_by if all(has_all) else "memory"

    def _counts(
        self,
        step: Step,
        streams: Sequence[Request],
        drafts: Sequence[Draft | None],
        slack: float,
        *,
        may_try: bool = True,
    ) -> tuple[list[int], DraftsEndedBy]:
        """Return how many tokens of each draft the step takes, and the limit on them.

        Args:
            may_try: whether one draft may be taken only to measure its cost.
        """
        rows = _ranked(drafts)
        count, ended_by = self._worth(step, streams, rows, slack, may_try=may_try)
        counts = [0] * len(streams)
        for row in rows[:count]:
            counts[row.place] += 1
        return counts, ended_by

    def _most_rows(self, step: Step) -> int:
        # After a change to a smaller limit, the step's samples may already exceed it.
        most = min(_MOST_ROWS, max(0, self._most_samples - step.shape.num_samples))
        most = min(most, step.most_drafts)
        return min(most, self._step_time.most_drafts) if self._speculative == "auto" else most

    def _most(self, request: Request, num_streams: int) -> int:
        if self._speculative != "auto":
            most = int(self._speculative)
        else:
            most = max(_FEWEST_A_STREAM, min(_MOST_A_STREAM, _MOST_ROWS // num_streams))
        # The chunk must end before the last token, and holds the next one already.
        return min(most, request.num_final_tokens - request.num_expected_tokens)

    def _best(self, request: Request, most: int) -> Draft | None:
        """Return the proposed draft with the most expected tokens."""
        if most <= 0:
            return None
        num_unknown = request.num_expected_tokens - 1 - request.num_tokens  # tokens in flight
        proposed = [drafter.propose(request, num_unknown + most) for drafter in self._drafters]
        return max(
            (_after_in_flight(draft, num_unknown) for draft in proposed if draft is not None),
            key=lambda draft: sum(draft.survival),
            default=None,
        )

    def _worth(
        self,
        step: Step,
        streams: Sequence[Request],
        rows: Sequence[_Row],
        slack: float,
        *,
        may_try: bool,
    ) -> tuple[int, DraftsEndedBy]:
        """Return how many of the first rows the step takes, and the limit on them."""
        if not rows:
            return 0, "proposals"
        is_auto = self._speculative == "auto"
        most = min(len(rows), self._most_rows(step))
        worth: _Worth | None = None
        if is_auto and self._step_time.is_known:
            worth = _Worth(self._step_time, step, self._wait_s(step, streams), slack)
        drafted, num_fitting, bound = step.shape.copy(), 0, None
        for row in rows[:most]:
            _add(drafted, streams, row)
            bound = self._budget.drafts_bound(drafted, step.limit_s)
            if bound is not None:
                break
            num_fitting += 1
            if worth is not None:
                worth.consider(drafted, row)
        count = 0 if is_auto else num_fitting
        if worth is not None:
            count = worth.best
        if is_auto and may_try and self._is_tried_again(rows[:num_fitting], count):
            count = 1
        if bound is not None and count == num_fitting:
            return count, bound
        return count, "proposals" if count == len(rows) else "worth"

    def _wait_s(self, step: Step, streams: Sequence[Request]) -> float:
        """Return the seconds that drafts cost beside the step."""
        # If a stream needs the values of earlier tokens, no step is planned ahead anyway.
        waits_anyway = any(stream.params.needs_values for stream in streams)
        return step.drafting_s + (0.0 if waits_anyway else self._turnaround_s)

    def _is_tried_again(self, rows: Sequence[_Row], count: int) -> bool:
        """Whether to take a draft only to measure its cost, which may have been high by chance."""
        if count:
            self._num_without, self._patience = 0, _TRIED_AGAIN
        elif rows and rows[0].chance > _LIKELY:
            self._num_without += 1
        if self._num_without <= self._patience:
            return False
        self._num_without, self._patience = 0, 2 * self._patience
        return True


class _Exploration:
    """Decides which steps may break the slack, only to measure what more drafts cost.

    Without a calibration, each doubling of a step's drafts is measured before the next, and fewer
    drafts than streams seldom keep the slack.
    """

    def __init__(self) -> None:
        self._num_steps = self._patience = self._known = 0

    def is_due(self, most_drafts: int, num_streams: int) -> bool:
        """Whether to explore in this step. Args: most_drafts: most whose cost is known."""
        if most_drafts >= num_streams:
            return False
        self._num_steps += 1
        if self._num_steps <= self._patience:
            return False
        has_learned = most_drafts > self._known
        self._patience = _TRIED_AGAIN if has_learned else 2 * self._patience
        self._num_steps, self._known = 0, most_drafts
        return True


class _Worth:
    """Finds the number of a step's first rows with most tokens per second.

    Only numbers count with which every stream expects its tokens as soon as without drafts.

    Args:
        wait_s: seconds that drafts cost beside the step.
        slack: as in `SchedulerConfig.speculative_slack`.

    Attributes:
        best: the number.
    """

    def __init__(self, step_time: StepTimeModel, step: Step, wait_s: float, slack: float) -> None:
        self._step_time = step_time
        self._wait_s = wait_s
        self._tokens = float(step.shape.num_tokens)
        self._expected = ExpectedTokens(step.shape.num_decode_rows, slack)
        self._without_s = step.drafting_s + step_time.seconds(step.shape)
        self._best_rate = _GAIN * self._tokens / self._without_s
        self._num_rows = self.best = 0

    def consider(self, drafted: StepShape, row: _Row) -> None:
        """Compare the step with one more row. Args: drafted: its shape with all rows so far."""
        self._num_rows += 1
        self._tokens += row.chance
        self._expected.add(row.place, row.chance)
        step_s = self._step_time.seconds(drafted) + self._wait_s
        rate = self._tokens / step_s
        if rate > self._best_rate and self._expected.repay(step_s / self._without_s):
            self.best, self._best_rate = self._num_rows, rate


def _after_in_flight(draft: Draft, count: int) -> Draft:
    """Return the draft after its first `count` tokens, which guess tokens in flight."""
    chances = draft.chances[count:]
    if count and chances:
        chances = [math.prod(draft.chances[: count + 1]), *chances[1:]]
    return draft._replace(token_ids=draft.token_ids[count:], chances=chances)


def _ranked(drafts: Sequence[Draft | None]) -> list[_Row]:
    """Rank drafted tokens by chance, each after the tokens that it depends on."""
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


class Drafters:
    """Drafters that are turned on and off by `speculative`; off, they do nothing.

    Args:
        drafters: propose drafts.
        draft_model: proposes drafts when it is worth its time.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        draft_model: CostlyDrafter | None,
        step_time: StepTimeModel,
        lengths: OutputLengths,
    ) -> None:
        self._drafters = drafters
        self._draft_model = draft_model
        self._step_time = step_time
        self._lengths = lengths
        self._drafting: Drafting | None = None  # None while they are off

    def configure(
        self, config: SchedulerConfig, budget: StepBudget, requests: Iterable[Request] = ()
    ) -> None:
        """Draft by other settings.

        Args:
            requests: all of the scheduler's, preempted ones included. Drafters that are turned on
                learn their tokens, and drafters that are turned off forget them.
        """
        was_on = self._drafting is not None
        self._drafting = self._make_drafting(config, budget)
        is_on = self._drafting is not None
        for request in requests if is_on is not was_on else ():
            if not is_on:
                self._forget(request)
            elif request.num_output_tokens:
                self.advance(request)

    def draft(self, step: Step, decodes: Decodes) -> DraftsEndedBy | None:
        """Add drafts to the streams of a step; return the limit on their number."""
        return None if self._drafting is None else self._drafting.add(step, decodes)

    def advance(self, request: Request) -> None:
        """Learn a request's new tokens."""
        if self._drafting is not None:
            self._drafting.advance(request)

    def record_turnaround(self, seconds: float) -> None:
        """See `Scheduler.record_turnaround`."""
        if self._drafting is not None:
            self._drafting.record_turnaround(seconds)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        if self._drafting is not None:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        for drafter in self._drafters:
            drafter.forget(request)
        if self._draft_model is not None:
            self._draft_model.forget(request)

    def _make_drafting(self, config: SchedulerConfig, budget: StepBudget) -> Drafting | None:
        if config.speculative == "off":
            return None
        model: ModelDrafting | None = None
        if self._draft_model is not None:
            model = ModelDrafting(self._draft_model, config, self._step_time, self._lengths)
        return Drafting(self._drafters, config, budget, self._step_time, model)
