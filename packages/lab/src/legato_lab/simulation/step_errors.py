"""Errors of single steps against their fitted costs: measured, and drawn again."""

import random
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from legato.scheduler.cost_fit import DISTURBED, MeasuredStep
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape

_BLOCK = 32
"""Number of consecutive steps whose errors are drawn together."""


class StepErrors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured over fitted durations, in the order of measurement.

    Attributes:
        decodes: errors of steps without prefill; they are short, so a hiccup is a larger share.
        prefills: errors of the other steps.
    """

    decodes: tuple[float, ...] = (1.0,)
    prefills: tuple[float, ...] = (1.0,)

    @classmethod
    def of(cls, steps: Sequence[MeasuredStep], costs: StepCosts) -> "StepErrors":
        """Measure the errors of steps. If one kind is missing, it gets those of the other."""
        ratios: dict[bool, list[float]] = {False: [], True: []}  # key: whether a step has prefill
        for shape, seconds in steps:
            ratios[shape.num_prefill_chunks > 0].append(seconds / costs.seconds(shape))
        return cls(
            decodes=tuple(ratios[False] or ratios[True]),
            prefills=tuple(ratios[True] or ratios[False]),
        )

    @property
    def disturbed(self) -> float:
        """Share of steps that took longer than the machine alone explains."""
        return float(np.mean(np.array(self.decodes + self.prefills) > DISTURBED))

    def quantile(self, shape: StepShape, probability: float) -> float:
        """Return the error that a fraction `probability` of such steps does not exceed."""
        return float(np.quantile(self.among(shape), probability))

    def among(self, shape: StepShape) -> tuple[float, ...]:
        """Return the errors of the same kind of step."""
        return self.prefills if shape.num_prefill_chunks else self.decodes


class ErrorSampler:
    """Draws errors of steps in blocks (the moving block bootstrap, Künsch, 1989).

    Slow steps come together and hit few requests hard, since what slows a machine lasts. Drawn one
    by one, they would hit all requests a little.
    """

    def __init__(self, errors: StepErrors, seed: int) -> None:
        self._errors = errors
        self._random = random.Random(seed)
        self._blocks: dict[bool, Iterator[float]] = {}  # key: whether a step has prefill

    def draw(self, shape: StepShape) -> float:
        """Return the error of the next step, which has this shape."""
        has_prefill = shape.num_prefill_chunks > 0
        while (error := next(self._blocks.get(has_prefill, iter(())), None)) is None:
            known = self._errors.among(shape)
            start = self._random.randrange(len(known))
            self._blocks[has_prefill] = iter(known[start : start + _BLOCK])
        return error
