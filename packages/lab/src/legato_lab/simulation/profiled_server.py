"""A simulated server on a machine known only by its profile.

Its steps' true times and its scheduler's belief differ: a simulator in which both were the same
would make every SLO look kept. See docs/contributing/scheduler.md.
"""

import itertools
import random

import msgspec
import numpy as np

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.plan import StepPlan
from legato.engine.calibration.calibration import MOST_DRAFTS
from legato.executor.simulated import VirtualClock
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.step_costs import EXPERT_TERM, ROW_BOUNDS, UNPACK_TERM, StepCosts
from legato.scheduler.step_shape import StepShape
from legato_lab.simulation.clients import Delays
from legato_lab.simulation.drafts import Acceptance
from legato_lab.simulation.profiles import Profile
from legato_lab.simulation.simulated_run import SimulatedEngine, simulated_engine

_ROUNDS = 3
_SAMPLED_CHUNKS = 0.2


class Truth:
    """Durations of the steps that run.

    Args:
        costs: as believed.
        error: largest relative error of each cost, drawn once; in [0, 1).
        noise: standard deviation of the logarithm of a step's duration, drawn for each step.
    """

    def __init__(self, costs: StepCosts, *, error: float, noise: float, seed: int) -> None:
        self._random = random.Random(seed)
        self._noise = noise
        # Without these costs, equal seeds draw what they drew before there were any.
        left_out = [i for i in (EXPERT_TERM, UNPACK_TERM) if not costs.vector[i]]
        factors = [
            self._random.uniform(1.0 - error, 1.0 + error) if place not in left_out else 1.0
            for place in range(len(costs.vector))
        ]
        self._costs = StepCosts.from_vector(np.array(costs.vector) * factors, costs.rows)

    def step_time_s(self, plan: StepPlan) -> float:
        """Return the duration of a step in seconds, with new noise in each call."""
        factor = self._random.lognormvariate(0.0, self._noise)
        return factor * self._costs.seconds(StepShape.of(plan))


class SimulatedServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server on a machine known only by its profile.

    Attributes:
        acceptance: how often drafts are accepted; None drafts nothing.
        overhead_s: time between two steps.
        truth_error, noise: as in `Truth`.
        seed: for all random numbers.
    """

    profile: Profile
    scheduler: SchedulerConfig
    enable_prefix_caching: bool = True
    acceptance: Acceptance | None = None
    overhead_s: float = 0.5e-3
    truth_error: float = 0.1
    noise: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.truth_error < 1.0:
            raise ConfigError(f"the truth's error must be in [0, 1), got {self.truth_error}")
        for name in ("overhead_s", "noise"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")

    @property
    def max_model_len(self) -> int:
        return self.profile.max_model_len

    @property
    def delays(self) -> Delays:
        return Delays(turnaround_s=self.overhead_s)

    def sibling(self, place: int) -> "SimulatedServer":
        return msgspec.structs.replace(self, seed=self.seed + place)

    def start(self, clock: VirtualClock, *, is_sharing: bool) -> SimulatedEngine:
        profile = self.profile
        config = self.scheduler.resolve(profile.max_model_len)
        assert config.max_num_seqs is not None
        calibration = calibrate(
            profile.costs,
            max_model_len=profile.max_model_len,
            max_num_seqs=config.max_num_seqs,
            most_drafts=0 if self.acceptance is None else config.most_samples - config.max_num_seqs,
            noise=self.noise,
            seed=self.seed,
        )
        truth = Truth(profile.costs, error=self.truth_error, noise=self.noise, seed=self.seed)
        return simulated_engine(
            clock,
            config,
            belief=calibration,
            rows=profile.costs.rows,
            step_time_s=truth.step_time_s,
            max_model_len=profile.max_model_len,
            kv_cache_tokens=profile.kv_cache_tokens,
            acceptance=self.acceptance,
            is_sharing=is_sharing,
        )


def calibrate(
    costs: StepCosts,
    *,
    max_model_len: int,
    max_num_seqs: int,
    most_drafts: int = 0,
    noise: float,
    seed: int,
) -> list[MeasuredStep]:
    """Make the measurements of `legato calibrate` on such a machine: mixtures of all kinds.

    Args:
        most_drafts: in a step; with 0, no step has any.
    """
    rng = random.Random(seed)
    rows = [0, *(2**i for i in range(max_num_seqs.bit_length()))]
    chunks = [0, *(bound for bound in ROW_BOUNDS if bound < max_model_len)]
    steps: list[MeasuredStep] = []
    for num_rows, num_tokens in _ROUNDS * [*itertools.product(rows, chunks)][1:]:
        shape = _mixture(num_rows, num_tokens, max_model_len, rng)
        steps.append((shape, costs.seconds(shape) * rng.lognormvariate(0.0, noise)))
    # Last, so that the other steps are the same with and without drafts.
    for num_rows, num_tokens in itertools.product(rows, chunks):
        num_drafts = min(MOST_DRAFTS, most_drafts // max(1, num_rows))
        if num_rows and num_drafts:
            num_drafts = rng.randint(1, num_drafts)
            shape = _mixture(num_rows, num_tokens, max_model_len, rng, num_drafts)
            steps.append((shape, costs.seconds(shape) * rng.lognormvariate(0.0, noise)))
    return steps


def _mixture(
    num_rows: int, num_tokens: int, max_model_len: int, rng: random.Random, num_drafts: int = 0
) -> StepShape:
    """Make a step of decodes with drafts, and a chunk of about `num_tokens` tokens."""
    shape = StepShape()
    for _ in range(num_rows):
        context = rng.randint(1, max_model_len)
        shape.add_decode(context)
        if num_drafts:
            shape.add_drafts(context, num_drafts)
    if num_tokens:
        num_tokens -= rng.randrange(num_tokens // 2)
        start = rng.randrange(max_model_len - num_tokens)
        shape.add_prefill(start, num_tokens, samples=rng.random() < _SAMPLED_CHUNKS)
    return shape
