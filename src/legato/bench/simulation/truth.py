"""How long simulated steps take, and what their scheduler is told of it.

A simulator in which both were the same would make every SLO look kept: see docs/architecture.md.
"""

import itertools
import random

import numpy as np

from legato.core.plan import StepPlan
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.step_costs import ROW_BOUNDS, StepCosts
from legato.scheduler.step_shape import StepShape

_ROUNDS = 3
_SAMPLED_CHUNKS = 0.2


class Truth:
    """Durations of the steps that run.

    Args:
        costs: what is believed of them.
        error: largest relative error of each cost, which is drawn once; in [0, 1).
        noise: standard deviation of the logarithm of a step's duration, drawn for each step.
    """

    def __init__(self, costs: StepCosts, *, error: float, noise: float, seed: int) -> None:
        self._random = random.Random(seed)
        self._noise = noise
        factors = [self._random.uniform(1.0 - error, 1.0 + error) for _ in costs.vector]
        self._costs = StepCosts.from_vector(np.array(costs.vector) * factors)

    def step_time_s(self, plan: StepPlan) -> float:
        """Duration of a step in seconds, another each time it is asked for."""
        factor = self._random.lognormvariate(0.0, self._noise)
        return factor * self._costs.seconds(StepShape.of(plan))


def calibrate(
    costs: StepCosts, *, max_model_len: int, max_num_seqs: int, noise: float, seed: int
) -> list[MeasuredStep]:
    """What `legato calibrate` would measure where steps cost this: mixtures of all kinds."""
    rng = random.Random(seed)
    rows = [0, *(2**i for i in range(max_num_seqs.bit_length()))]
    chunks = [0, *(bound for bound in ROW_BOUNDS if bound < max_model_len)]
    steps: list[MeasuredStep] = []
    for num_rows, num_tokens in _ROUNDS * [*itertools.product(rows, chunks)][1:]:
        shape = _mixture(num_rows, num_tokens, max_model_len, rng)
        steps.append((shape, costs.seconds(shape) * rng.lognormvariate(0.0, noise)))
    return steps


def _mixture(num_rows: int, num_tokens: int, max_model_len: int, rng: random.Random) -> StepShape:
    """Decodes, and a chunk of about so many tokens, at any positions."""
    shape = StepShape()
    for _ in range(num_rows):
        shape.add_decode(rng.randint(1, max_model_len))
    if num_tokens:
        num_tokens -= rng.randrange(num_tokens // 2)
        start = rng.randrange(max_model_len - num_tokens)
        shape.add_prefill(start, num_tokens, samples=rng.random() < _SAMPLED_CHUNKS)
    return shape
