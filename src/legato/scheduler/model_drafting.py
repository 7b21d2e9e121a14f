"""Decides whether a step asks the draft model, for which streams, and how deep.

The model's passes take time from the step, so this is decided before they run, from the duration of
earlier passes and the accuracy of earlier drafts. The model is asked if the step, passes included,
then yields more tokens per second than with the looked-up drafts, which are free, and still ends in
time. Before the model can draft, it must compute the tokens that it lacks, above all a prompt. It
catches up in slices beside several steps, if drafts of the stream's remaining output repay that.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from legato.core.config import SchedulerConfig
from legato.core.request import Request
from legato.scheduler.budget import UNLIMITED
from legato.scheduler.expected_ends import OutputLengths
from legato.scheduler.expected_tokens import ExpectedTokens
from legato.scheduler.step import Step
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from legato.speculation.drafter import CostlyDrafter, Draft

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MOST_MISSING = 16
"""Most tokens that a stream's first pass computes; more are computed before, in slices."""
_SLICE = 0.5
"""Most time spent on catching up beside a step, as a share of the step's own time."""


class _Candidate(NamedTuple):
    """A stream whose drafts from the model promise more tokens than the looked-up ones.

    Attributes:
        place: index of the stream in the step.
        looked_up: tokens expected of its looked-up drafts.
        expected: tokens expected of the model's first draft, its first two, and so on.
    """

    request: Request
    place: int
    looked_up: float
    expected: Sequence[float]
    num_missing: int

    @property
    def gain(self) -> float:
        return self.expected[-1] - self.looked_up

    def count(self, depth: int) -> int:
        """Return the stream's drafts if the model drafts `depth` tokens."""
        return min(depth, len(self.expected))


class _Option(NamedTuple):
    """A step in which some streams have the model's drafts.

    Attributes:
        shape, tokens: shape and expected tokens of the step, drafts included.
        passes_s: seconds of the model's passes.
        seconds: seconds of the passes and the step.
    """

    asked: Sequence[_Candidate]
    depth: int
    shape: StepShape
    tokens: float
    passes_s: float
    seconds: float


class _Base(NamedTuple):
    """A step with looked-up drafts alone. Attributes: counts: drafts of each stream."""

    step: Step
    streams: Sequence[Request]
    counts: Sequence[int]
    looked_up: Sequence[float]
    most_rows: int
    slack: float


class ModelDrafting:
    """Asks a draft model if that is worth its time.

    Args:
        config: resolved; if `speculative` is a number, a step has as many drafts as it has time
            for.
        lengths: forecasts the rest of each stream's output.
    """

    def __init__(
        self,
        drafter: CostlyDrafter,
        config: SchedulerConfig,
        step_time: StepTimeModel,
        lengths: OutputLengths,
    ) -> None:
        self._drafter = drafter
        self._is_auto = config.speculative == "auto"
        self._step_time = step_time
        self._lengths = lengths

    def advance(self, request: Request) -> None:
        """Pass a request's new tokens to the model."""
        self._drafter.advance(request)

    def improve(
        self,
        step: Step,
        streams: Sequence[Request],
        drafts: list[Draft | None],
        counts: Sequence[int],
        slack: float,
        *,
        most: Sequence[int],
        most_rows: int,
    ) -> None:
        """Replace looked-up drafts by the model's if these promise more tokens.

        Args:
            drafts: looked-up drafts of the streams; changed in place.
            counts: tokens of each draft that the step would take.
            slack: share by which a stream's expected time per token may grow.
            most: most drafts of each stream.
            most_rows: most drafts of the step.
        """
        is_known = self._step_time.is_known
        if not is_known and (self._is_auto or step.limit_s < UNLIMITED):
            return
        looked_up = [_expected(d, n) for d, n in zip(drafts, counts, strict=True)]
        base = _Base(step, streams, counts, looked_up, most_rows, slack)
        candidates = self._candidates(base, most)
        num_asked = max(1, len(candidates))
        without = self._option(base, (), 0)
        best = self._best([c for c in candidates if c.num_missing <= _MOST_MISSING], base, without)
        if best is not without:
            self._ask(step, drafts, best)
        else:
            self._drafter.skip_step()
        share_s = self._drafter.pass_s(num_asked) / num_asked
        behind = [c for c in candidates if c.num_missing > _MOST_MISSING]
        self._catch_up(step, self._repaying(behind, without, share_s), best, without.seconds)

    def _candidates(self, base: _Base, most: Sequence[int]) -> list[_Candidate]:
        """Return the streams that gain by the model, the largest gain first."""
        found: list[_Candidate] = []
        for place, request in enumerate(base.streams):
            if most[place] <= 0 or request.num_expected_tokens > request.num_tokens + 1:
                continue  # no draft is allowed, or a token in flight must be known first
            outlook = self._drafter.outlook(request, most[place])
            expected = list(accumulate(accumulate(outlook, mul)))
            if expected and expected[-1] > base.looked_up[place]:
                num_missing = self._drafter.num_missing(request)
                found.append(
                    _Candidate(request, place, base.looked_up[place], expected, num_missing)
                )
        found.sort(key=lambda candidate: -candidate.gain)
        return found

    def _best(self, ready: Sequence[_Candidate], base: _Base, without: _Option) -> _Option:
        """Return the option with most tokens per second; most tokens if the number is fixed."""
        best, safety_factor = without, self._step_time.safety_factor(base.step.limit_s)
        deepest = max((len(candidate.expected) for candidate in ready), default=0)
        depths = sorted({deepest, *(depth for depth in _DEPTHS if depth < deepest)})
        for count in _sizes(len(ready)):
            for depth in depths:
                option = self._option(base, ready[:count], depth)
                is_late = safety_factor * option.seconds > base.step.limit_s
                if is_late or option.shape.num_draft_rows > base.most_rows:
                    break
                if self._value(option) > self._value(best) and self._repays(option, base):
                    best = option
        return best

    def _repays(self, option: _Option, base: _Base) -> bool:
        """Whether no stream waits longer for its tokens because others draft."""
        if not self._is_auto:
            return True
        expected = ExpectedTokens(option.shape.num_decode_rows, base.slack)
        asked = {candidate.place: candidate for candidate in option.asked}
        for place, looked_up in enumerate(base.looked_up):
            candidate = asked.get(place)
            depth = 0 if candidate is None else candidate.count(option.depth)
            expected.add(place, looked_up if candidate is None else candidate.expected[depth - 1])
        undrafted_s = self._seconds(base.step.shape)
        return expected.repay(option.seconds / undrafted_s)

    def _value(self, option: _Option) -> float:
        return option.tokens / option.seconds if self._is_auto else option.tokens

    def _option(self, base: _Base, asked: Sequence[_Candidate], depth: int) -> _Option:
        shape = base.step.shape.copy()
        counts = list(base.counts)
        tokens = shape.num_tokens + sum(base.looked_up)
        num_rows = 0
        for candidate in asked:
            count = counts[candidate.place] = candidate.count(depth)
            tokens += candidate.expected[count - 1] - candidate.looked_up
            num_rows += candidate.num_missing
        for request, count in zip(base.streams, counts, strict=True):
            if count:
                shape.add_drafts(request.num_expected_tokens - 1, count)
        pass_s = self._drafter.pass_s
        passes_s = pass_s(num_rows) + (depth - 1) * pass_s(len(asked)) if asked else 0.0
        return _Option(asked, depth, shape, tokens, passes_s, passes_s + self._seconds(shape))

    def _seconds(self, shape: StepShape) -> float:
        if self._step_time.is_known:
            return self._step_time.seconds(shape)
        return self._drafter.pass_s(shape.num_tokens)  # no token is due: any estimate will do

    def _ask(self, step: Step, drafts: list[Draft | None], option: _Option) -> None:
        drafted = self._drafter.draft(
            [candidate.request for candidate in option.asked],
            [candidate.count(option.depth) for candidate in option.asked],
            token_s=option.seconds / option.tokens if self._is_auto else UNLIMITED,
            within_s=self._room_s(step, option),
        )
        step.spend(drafted.seconds)
        for candidate, draft in zip(option.asked, drafted.drafts, strict=True):
            if draft is not None and _expected(draft) > _expected(drafts[candidate.place]):
                drafts[candidate.place] = draft

    def _room_s(self, step: Step, option: _Option) -> float:
        """Return the seconds that the step leaves before the first token is due."""
        if step.limit_s == UNLIMITED:
            return UNLIMITED
        return step.limit_s / self._step_time.safety_factor(step.limit_s) - self._seconds(
            option.shape
        )

    def _catch_up(
        self, step: Step, behind: list[_Candidate], option: _Option, step_s: float
    ) -> None:
        within_s = min(_SLICE * step_s, self._room_s(step, option))
        if behind and within_s > 0.0:
            behind.sort(key=lambda candidate: candidate.num_missing)
            requests = [candidate.request for candidate in behind]
            step.spend(self._drafter.catch_up(requests, within_s))

    def _repaying(
        self, behind: Sequence[_Candidate], without: _Option, share_s: float
    ) -> list[_Candidate]:
        """Return the streams whose drafts save more time than catching up takes.

        Args:
            share_s: one stream's share of a pass.
        """
        if not (behind and self._is_auto):
            return list(behind)
        left = self._lengths.expected([candidate.request for candidate in behind])[:, 0]
        token_s = without.seconds / without.tokens
        return [
            candidate
            for candidate, num_left in zip(behind, left.tolist(), strict=True)
            if num_left * self._saved_s(candidate, without, token_s, share_s)
            > self._drafter.pass_s(candidate.num_missing)
        ]

    def _saved_s(
        self, candidate: _Candidate, without: _Option, token_s: float, share_s: float
    ) -> float:
        """Return the seconds saved per token of the stream at its best draft depth."""
        drafted = without.shape.copy()
        drafted.add_drafts(candidate.request.num_expected_tokens - 1, 1)
        row_s = self._seconds(drafted) - self._seconds(without.shape) + share_s
        return max(
            ((expected - candidate.looked_up) * token_s - depth * row_s) / (1.0 + expected)
            for depth, expected in enumerate(candidate.expected, 1)
        )


def _expected(draft: Draft | None, count: int | None = None) -> float:
    """Return how many of a draft's first `count` tokens, or of all, are expected to be right."""
    return 0.0 if draft is None else sum(draft.survival[:count])


def _sizes(most: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on below `most`, then `most`."""
    size = 1
    while size < most:
        yield size
        size *= 2
    if most:
        yield most
