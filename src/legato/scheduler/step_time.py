"""The scheduler's prediction of a step's duration, corrected by every step that runs."""

import logging
import math
from collections.abc import Sequence
from statistics import median
from typing import Literal, get_args

from legato.core.plan import Deadline
from legato.core.rows import CPU_ROWS, RowCounts
from legato.scheduler.cost_fit import CostFit, MeasuredStep, fit, outlier_weight
from legato.scheduler.margin import LARGEST_FACTOR, Deadlines, Margin, Tails, is_bound
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape

logger = logging.getLogger(__name__)

StepKind = Literal["decodes", "drafts", "prefill"]
"""Kind of a step by its contents; a step with prefill is "prefill", even beside decodes."""

UNKNOWN_TOKEN_S = 1e-3
"""Assumed seconds per token while step times are unknown."""

_REFIT_STEPS = 16
_LEARNING_STEPS = 32
"""Steps after which the fit is used if there was no calibration."""
_DRIFT_RATE = 0.11
"""Rate at which the overall scale follows the last steps, for example on a throttled machine."""
_SHORTEST_S, _LONGEST_S = 1e-6, 86_400.0
"""A measurement outside these bounds is a clock error and is ignored."""
_PRESENT_S, _LASTING_S = 0.5, 10.0
"""Seconds of steps that measure how slow the machine is at present, and how slow it was lately."""
_INTERRUPTION = 0.3
"""Relative residual above which the model is not to blame: another program had the machine."""
_ALONE = 0.05
"""Share of its memory by which a single slow step counts for a slowdown, at most."""
_FIRST_DRAFTS = 2
_DROPPABLE = 1.0 / 3.0
"""Share of a step's prefill that a step can still drop after an interruption, on average: it drops
none before a third of its layers, and none after its last look at the clock."""
_CHECKED_STEPS = 100
"""First steps in service that a calibration is checked against."""
_DISAGREEMENT, _MOST_DISAGREEING = 1.5, 0.25
"""A step disagrees with a prediction that is wrong by more than this factor; a calibration is wrong
if more than this share of the steps disagree."""
_SURPRISE_RATE, _MOST_SURPRISING = 0.1, 0.5
"""If this share of the last ten or so steps of a kind seems interrupted, the model is to blame: it
has not seen such steps."""


class StepTimeModel:
    """Predicts a step's seconds from its shape, and how far off the prediction may be.

    Args:
        prior: steps measured by a calibration.
        rows: row counts that batches are padded to.
        tails: what earlier runs on this machine remember; None learns from `prior`.
        drops_rows: whether the executor drops rows to keep deadlines.

    Attributes:
        prior_verdict: how the first `_CHECKED_STEPS` steps judged the calibration: "scaled" if
            they were all slower or faster than it by about one factor, "wrong" if it was replaced
            by these steps, else "".
    """

    def __init__(
        self,
        prior: Sequence[MeasuredStep] = (),
        rows: RowCounts = CPU_ROWS,
        tails: Tails | None = None,
        *,
        drops_rows: bool = False,
    ) -> None:
        self._rows = rows
        self._deadlines = Deadlines() if drops_rows else None
        self._num_steps = 0
        self._margin = Margin(tails)
        self._promise_s = math.inf
        self.begin_again(prior)
        if tails is None:
            for shape, seconds in prior:
                if _is_measurement(seconds):
                    self._observe_margin(shape, self.seconds(shape), seconds, None)

    def begin_again(self, prior: Sequence[MeasuredStep]) -> None:
        """Start again from a new calibration; keep only the margin."""
        self.prior_verdict: Literal["", "scaled", "wrong"] = ""
        self._start_from(prior)
        self._check = None if self._costs is None else _PriorCheck(self._costs, self._rows)

    def _start_from(self, prior: Sequence[MeasuredStep]) -> None:
        prior = [(shape, seconds) for shape, seconds in prior if _is_measurement(seconds)]
        self._fit = CostFit(prior, self._rows)
        self._costs: StepCosts | None = self._fit.solve() if prior else None
        self._scale = 1.0  # factor on the costs since they were solved
        self._most_drafts = max([shape.num_draft_rows for shape, _ in prior], default=0)
        self._surprising: dict[StepKind, float] = dict.fromkeys(get_args(StepKind), 0.0)
        """Value: share of recent steps that seem interrupted."""
        self.forget_present()

    @property
    def is_known(self) -> bool:
        """Whether there is a calibration, or enough steps, to predict from."""
        return self._costs is not None

    def seconds(self, shape: StepShape) -> float:
        """Return the expected duration of a step; requires `is_known`."""
        assert self._costs is not None
        return max(_SHORTEST_S, self._scale * self._costs.seconds(shape))

    def chunk_s(self, shape: StepShape, start: int, num_tokens: int) -> float:
        """Return the seconds that one more prefill chunk is expected to add to a step."""
        assert self._costs is not None
        return self._scale * self._costs.chunk_cost_s(shape, start, num_tokens)

    def prefill_s(self, start: int, num_tokens: int) -> float:
        """Return the seconds of a prefill chunk alone; assumed ones until `is_known`."""
        if not self.is_known:
            return UNKNOWN_TOKEN_S * num_tokens
        return self.chunk_s(StepShape(), start, num_tokens)

    def drafts_s(self, shape: StepShape) -> float:
        """Return the seconds that its drafts are expected to add to a step."""
        if not shape.num_draft_rows:
            return 0.0
        return max(0.0, self.seconds(shape) - self.seconds(shape.without_drafts()))

    def longest_chunk(
        self, shape: StepShape, start: int, limit_s: float, cap: int, *, has_margin: bool = True
    ) -> int:
        """Return the longest chunk at `start` whose step ends in time.

        If time bounds the chunk, it may be shorter to avoid padding or unpacking.

        Args:
            limit_s: how long the step may take; without any time, no token fits.
            cap: most tokens to return.
            has_margin: whether the step may exceed its prediction by the margin, and still end in
                time.
        """
        assert self._costs is not None
        if not limit_s > 0.0:  # nor is nan
            return 0
        allowed_s = limit_s / self.prefill_safety_factor(shape, limit_s) if has_margin else limit_s
        longest = self._costs.longest_chunk(shape, start, allowed_s / self._scale, cap)
        return longest if longest == cap else self._costs.cheapest_chunk(shape, start, longest)

    @property
    def most_drafts(self) -> int:
        """Most drafts of a step whose cost is known: twice as many as any step had.

        Without a calibration, each doubling is measured before the next.
        """
        return max(_FIRST_DRAFTS, 2 * self._most_drafts)

    @property
    def margin(self) -> float:
        """Share by which a step may exceed its prediction under the strictest promise.

        If the executor drops rows, it is that of steps that may drop some.
        """
        own = self._prefill_factor
        return self.margin_at(self._promise_s) if own is None else own - 1.0

    @property
    def tails(self) -> Tails:
        """How far steps exceeded their predictions, for later runs on this machine."""
        return self._margin.tails

    def margin_at(self, limit_s: float) -> float:
        """Return the share by which a step that must end in `limit_s` may exceed its prediction."""
        return self._margin.factor(limit_s) - 1.0

    def promise(self, promise_s: float) -> None:
        """Set the shortest promise, for `margin`."""
        self._promise_s = promise_s

    def set_miss_rate(self, late: float) -> None:
        """Set the chance of a late step that the streams of the next step bear."""
        self._margin.set_miss_rate(late)
        if self._deadlines is not None:
            self._deadlines.set_miss_rate(late)

    def decay_margin(self, refused: StepShape, limit_s: float) -> None:
        """Shrink the margin a little if it alone kept work out of a step.

        Steps without prefill say nothing about the margin. So it stays if the work would be late
        without a margin, too, or is left out although the margin has room for it.

        Args:
            refused: the step with the least of the work that was left out.
        """
        if not (self.is_known and is_bound(limit_s)):
            return
        needed_s, factor = self.seconds(refused), self.safety_factor(limit_s)
        if refused.num_prefill_chunks:
            factor = self.prefill_safety_factor(refused, limit_s)
        if needed_s * factor <= limit_s or needed_s * self._present.factor > limit_s:
            return
        self._margin.expire()
        if self._deadlines is not None:
            self._deadlines.expire()

    def safety_factor(self, limit_s: float) -> float:
        """Return the factor on the prediction of a step that must end in `limit_s`."""
        return max(self._margin.factor(limit_s), self._present.factor)

    def prefill_safety_factor(self, streams: StepShape, limit_s: float) -> float:
        """Return the factor on the prediction of a step that is filled with prefill.

        Beside streams, rows can be dropped if the executor does so. What can be dropped after an
        interruption, on average, needs no room for it.
        """
        safety_factor, own = self.safety_factor(limit_s), self._prefill_factor
        if own is None or not streams.num_decode_rows or not is_bound(limit_s):
            return safety_factor
        whole_s = limit_s / safety_factor
        prefill_s = whole_s - self.seconds(streams.without_prefill())
        longest_s = whole_s + max(0.0, prefill_s * _DROPPABLE / (1.0 - _DROPPABLE))
        return max(own, self._present.factor, limit_s / longest_s)

    @property
    def _prefill_factor(self) -> float | None:
        if self._deadlines is None:
            return None
        return min(self._margin.body_factor + self._deadlines.shortening, LARGEST_FACTOR)

    def deadline(self, shape: StepShape, limit_s: float) -> Deadline | None:
        """Return the deadline of a step whose streams' tokens are due at `limit_s`.

        None if the executor keeps none, if the step has no rows to drop, or if nothing bounds it.
        """
        is_mixed = shape.num_decode_rows > 0 and shape.num_prefill_tokens > 0
        if self._deadlines is None or not (self.is_known and is_mixed and is_bound(limit_s)):
            return None
        streams_s = self.seconds(shape.without_prefill())
        return Deadline(
            layers_s=limit_s - self._deadlines.guard_s(limit_s),
            late_s=limit_s,
            prefill_share=1.0 - min(1.0, streams_s / self.seconds(shape)),
        )

    def observe_deadline(
        self, deadline: Deadline, delivered_s: float, foreseen_s: float | None, dropped: float
    ) -> None:
        """Learn from a step that had a deadline; arguments are as in `Deadlines.observe`."""
        if self._deadlines is not None:
            self._deadlines.observe(delivered_s, deadline.late_s, foreseen_s, dropped)

    @property
    def slowdown(self) -> float:
        """Factor by which steps exceed their usual time, at present or over the last seconds."""
        return max(self._present.factor, self._lasting.factor)

    def forget_present(self) -> None:
        """Assume the machine's usual speed: no recent step measures the present one."""
        self._present, self._lasting = _Slowdown(_PRESENT_S), _Slowdown(_LASTING_S)

    def observe(
        self,
        shape: StepShape,
        seconds: float,
        delivered_s: float | None = None,
        limit_s: float | None = None,
    ) -> None:
        """Learn from a step that ran, unless its measurement cannot be true.

        Args:
            delivered_s: the step's duration as clients saw it; None takes `seconds`.
            limit_s: how long the step was allowed to take; None if nothing is promised.
        """
        if not _is_measurement(seconds):
            return
        self._num_steps += 1
        residual = 0.0
        if self._costs is not None:
            usual_s = self.seconds(shape)
            residual = seconds / usual_s - 1.0
            taken_s = seconds if delivered_s is None else delivered_s
            self._observe_margin(shape, usual_s, taken_s, limit_s)
            self._present.observe(usual_s, seconds)
            self._lasting.observe(usual_s, seconds)
        has_more_drafts = shape.num_draft_rows > self._most_drafts
        if not self._is_interruption(shape, residual) or has_more_drafts:
            weight = outlier_weight(residual)
            self._follow(weight * residual)
            self._fit.add(shape, seconds, weight * _share_of_prediction(residual))
        self._most_drafts = max(self._most_drafts, shape.num_draft_rows)
        if self._check is not None:
            self._check.steps.append((shape, seconds))
            if len(self._check.steps) >= _CHECKED_STEPS:
                self._judge_prior(self._check)
                return
        learned = self.is_known or self._num_steps >= _LEARNING_STEPS
        if learned and (has_more_drafts or self._num_steps % _REFIT_STEPS == 0):
            self._costs, self._scale = self._fit.solve(), 1.0

    def _judge_prior(self, check: "_PriorCheck") -> None:
        """Keep the calibration, or go by the steps in service instead."""
        self._check, factor = None, check.factor
        if check.is_right:
            return
        self.prior_verdict = "scaled" if check.is_scaled else "wrong"
        logger.warning(
            "steps take %.2g times as long as measured before; what was measured is %s",
            factor,
            "scaled" if check.is_scaled else "dropped, because no factor explains these steps",
        )
        if not check.is_scaled:
            self._start_from(check.steps)

    def _observe_margin(
        self, shape: StepShape, usual_s: float, taken_s: float, limit_s: float | None
    ) -> None:
        is_mixed = shape.num_prefill_chunks > 0 and shape.num_decode_rows > 0
        self._margin.observe(usual_s, taken_s, limit_s, is_mixed=is_mixed)

    def _follow(self, error: float) -> None:
        """Move all predictions a little towards the machine's present speed.

        `_scale` corrects the costs until they are solved again; the fit is rescaled too.
        """
        drift = 1.0 + _DRIFT_RATE * error
        self._scale *= drift
        self._fit.rescale(drift)

    def _is_interruption(self, shape: StepShape, residual: float) -> bool:
        kind, seems_so = _kind(shape), abs(residual) > _INTERRUPTION
        surprising = self._surprising[kind]
        self._surprising[kind] += _SURPRISE_RATE * (seems_so - surprising)
        return seems_so and surprising < _MOST_SURPRISING


def _is_measurement(seconds: float) -> bool:
    return _SHORTEST_S <= seconds <= _LONGEST_S


def _share_of_prediction(residual: float) -> float:
    """Return the weight that makes the fit's squared error relative to the predicted seconds.

    The fit's own error is relative to the measured seconds. The scale follows errors relative to
    the prediction, so with this weight scale and fit settle at the same prediction. Without it the
    scale would advance and the fit pull it back, step after step. A step unlike its prediction
    keeps its weight, so that it is learned at once.
    """
    return (1.0 + residual) ** 2 if abs(residual) <= _INTERRUPTION else 1.0


def _kind(shape: StepShape) -> StepKind:
    if shape.num_prefill_chunks:
        return "prefill"
    return "drafts" if shape.num_draft_rows else "decodes"


class _PriorCheck:
    """Compares a calibration with the first steps in service.

    Attributes:
        steps: these steps, to be added.
    """

    def __init__(self, costs: StepCosts, rows: RowCounts) -> None:
        self._costs = costs
        self._rows = rows
        self.steps: list[MeasuredStep] = []

    @property
    def factor(self) -> float:
        """Median factor by which steps took longer than calibrated."""
        return median(self._ratios(self._costs))

    @property
    def is_right(self) -> bool:
        return self._disagreeing(self._costs, 1.0) <= _MOST_DISAGREEING

    @property
    def is_scaled(self) -> bool:
        """Whether one factor explains the steps, or costs of their own explain them no better.

        On a busy machine, no costs explain them.
        """
        others = self._disagreeing(self._costs, self.factor)
        own = self._disagreeing(fit(self.steps, self._rows), 1.0)
        return others <= max(_MOST_DISAGREEING, 2.0 * own)

    def _ratios(self, costs: StepCosts) -> list[float]:
        return [seconds / max(_SHORTEST_S, costs.seconds(shape)) for shape, seconds in self.steps]

    def _disagreeing(self, costs: StepCosts, factor: float) -> float:
        """Return the share of steps that disagree with `factor` times the costs."""
        bound = math.log(_DISAGREEMENT)
        wrong = [abs(math.log(ratio / factor)) > bound for ratio in self._ratios(costs)]
        return sum(wrong) / len(wrong)


class _Slowdown:
    """Factor by which the last steps together exceeded their usual time, at least 1.

    It is the inverse of the mean speed over the last seconds. A step far longer than usual may be a
    pause of the whole machine, as when a laptop is closed. So it counts as a short interruption,
    unless the step before it was as slow.

    Args:
        memory_s: seconds of steps after which a step's weight falls to a third.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._speed = 1.0
        self._last_ratio = 1.0

    @property
    def factor(self) -> float:
        return max(1.0, 1.0 / self._speed)

    def observe(self, usual_s: float, taken_s: float) -> None:
        alone_s = usual_s + max(_INTERRUPTION * usual_s, _ALONE * self._memory_s)
        counted_s = min(taken_s, max(alone_s, self._last_ratio * usual_s))
        counted_s = max(counted_s, (1.0 - _INTERRUPTION) * usual_s)
        self._last_ratio = taken_s / usual_s
        share = -math.expm1(-counted_s / self._memory_s)
        self._speed += share * (usual_s / counted_s - self._speed)
