"""The scheduler's belief about how long a step will take, corrected by every step that runs."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

from legato.core.rows import CPU_ROWS, RowCounts
from legato.scheduler.cost_fit import CostFit, MeasuredStep, outlier_weight
from legato.scheduler.margin import Margin
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape

StepKind = Literal["decodes", "drafts", "prefill"]
"""What steps hold, prefill beside anything else."""

_REFIT_STEPS = 16
_LEARNING_STEPS = 32
"""Steps without a calibration after which the fit is believed."""
_DRIFT_RATE = 0.11
"""How fast the overall scale follows the last steps, as a machine that is throttled wants."""
_SHORTEST_S, _LONGEST_S = 1e-6, 86_400.0
"""A measurement outside these is an error of a clock: nothing is learned from it."""
_PRESENT_S, _LASTING_S = 0.5, 10.0
"""Seconds of steps that tell how slow the machine is at present, and how slow it lately was."""
_INTERRUPTION = 0.3
"""Relative residual beyond which it was not the model that erred: another program had the
machine."""
_FIRST_DRAFTS = 2
_SURPRISE_RATE, _MOST_SURPRISING = 0.1, 0.5
"""Where as many of the last ten or so steps of a kind seem to have been interrupted, it was the
model, which has not seen such steps."""


class StepTimeModel:
    """Predicts a step's seconds from its shape, and how far off the prediction may be.

    Args:
        prior: steps measured by a calibration.
        rows: what batches are padded to.
    """

    def __init__(self, prior: Sequence[MeasuredStep] = (), rows: RowCounts = CPU_ROWS) -> None:
        self._rows = rows
        self._num_steps = 0
        self._margin = Margin()
        self.begin_again(prior)

    def begin_again(self, prior: Sequence[MeasuredStep]) -> None:
        """Believe in a new calibration, and in nothing else but the margin."""
        prior = [(shape, seconds) for shape, seconds in prior if _is_measurement(seconds)]
        self._fit = CostFit(prior, self._rows)
        self._costs: StepCosts | None = self._fit.solve() if prior else None
        self._scale = 1.0  # of the costs, since they were solved for
        self._most_drafts = max([shape.num_draft_rows for shape, _ in prior], default=0)
        self._surprising: dict[StepKind, float] = dict.fromkeys(get_args(StepKind), 0.0)
        """Value the share of late that seem interrupted."""
        self.forget_present()

    @property
    def is_known(self) -> bool:
        """Whether there is anything to predict from: a calibration, or enough steps."""
        return self._costs is not None

    def seconds(self, shape: StepShape) -> float:
        """The expected duration of a step; asked only where `is_known`."""
        assert self._costs is not None
        return max(_SHORTEST_S, self._scale * self._costs.seconds(shape))

    def chunk_s(self, shape: StepShape, start: int, num_tokens: int) -> float:
        """How much longer one more prefill chunk is expected to make a step."""
        assert self._costs is not None
        return self._scale * self._costs.chunk_cost_s(shape, start, num_tokens)

    def drafts_s(self, shape: StepShape) -> float:
        """How much longer a step is expected to take for its drafts."""
        if not shape.num_draft_rows:
            return 0.0
        return max(0.0, self.seconds(shape) - self.seconds(shape.without_drafts()))

    def longest_chunk(self, shape: StepShape, start: int, limit_s: float, cap: int) -> int:
        """Most prefill tokens from `start` on with which the step, margin included, ends in time.

        Where time bounds them, it is a few less if that spares the step its padding.

        Args:
            limit_s: how long the step may take.
            cap: most tokens to return.
        """
        assert self._costs is not None
        allowed_s = limit_s / self.caution
        longest = self._costs.longest_chunk(shape, start, allowed_s / self._scale, cap)
        return longest if longest == cap else self._costs.unpadded_chunk(shape, start, longest)

    @property
    def most_drafts(self) -> int:
        """Drafts of a step up to which its cost is told from steps: twice as many as any had.

        Where nothing was measured beforehand, each doubling is, before the next.
        """
        return max(_FIRST_DRAFTS, 2 * self._most_drafts)

    @property
    def margin(self) -> float:
        """Share of its prediction that a step is allowed to take longer.

        It is told from steps that held prefill beside decodes, which is what it is for: steps of
        decodes alone are short, so that the same hiccup is a larger part of them.
        """
        return self._margin.value

    def promise(self, quantile: float) -> None:
        """Keep a margin for so large a share of a request's gaps to be in time."""
        self._margin.promise(quantile)

    def expire_margin(self) -> None:
        """A step had to leave prefill out: the margin that is why is forgotten in the end."""
        self._margin.expire()

    @property
    def caution(self) -> float:
        """What a prediction is multiplied by where the step must end in time just now."""
        return max(1.0 + self.margin, self._present.factor)

    @property
    def slowness(self) -> float:
        """How many times as long as usual steps take at present, or lately took on the whole."""
        return max(self._present.factor, self._lasting.factor)

    def forget_present(self) -> None:
        """Believe in the machine's usual speed: no step tells of the present one any more."""
        self._present, self._lasting = _Slowness(_PRESENT_S), _Slowness(_LASTING_S)

    def observe(
        self,
        shape: StepShape,
        seconds: float,
        delivered_s: float | None = None,
        limit_s: float | None = None,
    ) -> None:
        """Learn from a step that ran, unless its measurement cannot be true.

        Args:
            delivered_s: how long it took as clients saw it; None takes `seconds`.
            limit_s: how long it was allowed to take; None where nothing is promised.
        """
        if not _is_measurement(seconds):
            return
        self._num_steps += 1
        residual = 0.0
        if self._costs is not None:
            usual_s = self.seconds(shape)
            residual = seconds / usual_s - 1.0
            if shape.num_prefill_chunks and shape.num_decode_rows:
                taken_s = seconds if delivered_s is None else delivered_s
                self._margin.observe(_error(taken_s, usual_s, limit_s))
            self._present.observe(usual_s, seconds)
            self._lasting.observe(usual_s, seconds)
        has_more_drafts = shape.num_draft_rows > self._most_drafts
        if not self._is_interruption(shape, residual) or has_more_drafts:
            weight = outlier_weight(residual)
            self._follow(weight * residual)
            self._fit.add(shape, seconds, weight * _share_of_prediction(residual))
        self._most_drafts = max(self._most_drafts, shape.num_draft_rows)
        learned = self.is_known or self._num_steps >= _LEARNING_STEPS
        if learned and (has_more_drafts or self._num_steps % _REFIT_STEPS == 0):
            self._costs, self._scale = self._fit.solve(), 1.0

    def _follow(self, error: float) -> None:
        """Take the machine to have changed its speed a little, for all steps alike.

        The scale is of the costs since they were solved for: their fit has it, too.
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
    """Makes the fit's squared error, a share of the measured seconds, one of the predicted.

    The scale follows errors of the latter kind, and where both are the same, both come to rest at
    the same prediction. Otherwise the scale would go on where the fit pulls back, step after step.
    A step unlike its prediction is left as it is: it is to be learned from at once.
    """
    return (1.0 + residual) ** 2 if abs(residual) <= _INTERRUPTION else 1.0


def _kind(shape: StepShape) -> StepKind:
    if shape.num_prefill_chunks:
        return "prefill"
    return "drafts" if shape.num_draft_rows else "decodes"


def _error(taken_s: float, usual_s: float, limit_s: float | None) -> float:
    """What a step took longer, as a share of the prediction of one that it would make late.

    A step may be predicted to take less than is allowed for. Then what it took longer is a larger
    part of it, and margins made of such parts make steps shorter and shorter.
    """
    later_s = taken_s - usual_s
    if limit_s is None or limit_s <= usual_s:
        return later_s / usual_s
    return later_s / (limit_s - later_s) if later_s < limit_s else math.inf


class _Slowness:
    """How many times as long as usual the last steps took together, and never less than once.

    Args:
        memory_s: seconds of steps after which one counts for a third of what it did.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._taken_s = self._usual_s = 0.0

    @property
    def factor(self) -> float:
        return max(1.0, self._taken_s / self._usual_s) if self._usual_s else 1.0

    def observe(self, usual_s: float, taken_s: float) -> None:
        kept = math.exp(-taken_s / self._memory_s)
        self._taken_s = kept * self._taken_s + taken_s
        self._usual_s = kept * self._usual_s + usual_s
