"""Searches the largest sustained rate: brackets it, then bisects, once for each seed."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
from scipy.special import stdtrit

from legato.core.errors import ConfigError
from legato.core.slo import P99
from legato_lab.capacity.rule import CapacityRule
from legato_lab.capacity.trial import Load, Trial
from legato_lab.capacity.unloaded import UnloadedTtft
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.workload import Workload
from legato_lab.workload.trials import TrialSource

_MEDIAN_E2E_TIMES = 20
_E2E_SLACK = 1.25  # one longer trial at first rather than several repeats
_FIRST_STEP = 2.0
_NEAR_STEP = 1.1  # around another seed's result
_MAX_UP, _MAX_DOWN = 12, 5  # doublings; a trial with few requests takes twice as long each time
_CONFIDENCE = 0.95

RunTrial = Callable[[Load, Workload], Sequence[RequestRecord]]
"""Serves a load until its end, or until it is lost, and returns its records."""


class TrialLength(msgspec.Struct, frozen=True, kw_only=True):
    """The length of a trial: at least 20 median end-to-end times, `least_s` and `least_requests`.

    Attributes:
        least_requests: that arrive in that time; with few requests, a verdict means little.
    """

    least_s: float = 120.0
    least_requests: int = 100

    def load(self, rate_per_s: float, seed: int, median_e2e_s: float) -> Load:
        """Args: median_e2e_s: as expected."""
        measured_s = max(
            self.least_s,
            self.least_requests / rate_per_s,
            _E2E_SLACK * _MEDIAN_E2E_TIMES * median_e2e_s,
        )
        return Load(rate_per_s=rate_per_s, measured_s=measured_s, seed=seed)


class SearchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The user's settings of a search, including those of its `CapacityRule`.

    Attributes:
        seed: the first of `num_seeds`.
        least_rate_per_s: rates below are not searched: trials of few requests a second are long.
        precision: the found rate and one that is not sustained differ by at most this fraction.
    """

    itl_slo_s: float
    itl_slo_quantile: float = P99
    least_attainment: float | None = None
    max_delay_s: float = 2.0
    length: TrialLength = TrialLength()
    num_seeds: int = 1
    seed: int = 0
    start_rate_per_s: float = 1.0
    least_rate_per_s: float = 0.0
    precision: float = 0.05

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.num_seeds)

    def rule(self, unloaded: UnloadedTtft) -> CapacityRule:
        """Return the rule for a server with these unloaded TTFTs."""
        return CapacityRule(
            itl_slo_s=self.itl_slo_s,
            itl_slo_quantile=self.itl_slo_quantile,
            least_attainment=self.least_attainment,
            max_delay_s=self.max_delay_s,
            unloaded=unloaded,
        )


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search.

    Attributes:
        rates_per_s: for each seed, the largest sustained rate, or the rate at which its requests
            finished if that is smaller; 0 if no rate was sustained.
        num_source_requests: that trials drew from; a larger trial repeats them.
        trials: in the order in which they were run.
    """

    rates_per_s: list[float]
    num_source_requests: int
    rule: CapacityRule
    trials: list[Trial]

    @property
    def rate_per_s(self) -> float:
        """The mean over the seeds."""
        return float(np.mean(self.rates_per_s))

    @property
    def best(self) -> list[Trial]:
        """The sustained trial with the largest rate, for each seed that has one."""
        sustained = [trial for trial in self.trials if trial.is_sustained]
        by_rate = sorted(sustained, key=lambda trial: trial.rate_per_s)
        return list({trial.load.seed: trial for trial in by_rate}.values())

    @property
    def interval_per_s(self) -> tuple[float, float] | None:
        """The 95 % confidence interval, by Student's t over the seeds; None with one seed."""
        num_seeds = len(self.rates_per_s)
        if num_seeds < 2:
            return None
        error = float(np.std(self.rates_per_s, ddof=1)) / math.sqrt(num_seeds)
        half = float(stdtrit(num_seeds - 1, (1.0 + _CONFIDENCE) / 2)) * error
        return max(0.0, self.rate_per_s - half), self.rate_per_s + half


def find_capacity(
    run_trial: RunTrial,
    source: TrialSource,
    rule: CapacityRule,
    settings: SearchSettings,
    on_trial: Callable[[Trial], None] | None = None,
) -> Capacity:
    """Search for the largest sustained rate with each seed.

    Doubles or halves the rate until the answer is between two, then bisects their logarithms. A
    seed begins near the answer of the one before.

    Args:
        on_trial: called with each verdict.

    Raises:
        ConfigError: the first rate is infinite.
    """
    if not math.isfinite(settings.start_rate_per_s):
        raise ConfigError("a search for the capacity begins with a finite rate")
    trials = _Trials(run_trial, source, rule, settings.length, on_trial)
    rates_per_s: list[float] = []
    start_per_s, step = settings.start_rate_per_s, _FIRST_STEP
    for seed in settings.seeds:
        best = _search(partial(trials.run, seed), settings, start_per_s, step)
        rates_per_s.append(0.0 if best is None else _capacity_per_s(best))
        if best is not None:
            start_per_s, step = best.rate_per_s, _NEAR_STEP
    return Capacity(
        rates_per_s=rates_per_s,
        num_source_requests=len(source.requests),
        rule=rule,
        trials=trials.ended,
    )


class _Trials:
    """Runs trials that are long enough.

    Attributes:
        ended: all trials, except short ones that were repeated.
    """

    def __init__(
        self,
        run_trial: RunTrial,
        source: TrialSource,
        rule: CapacityRule,
        length: TrialLength,
        on_trial: Callable[[Trial], None] | None,
    ) -> None:
        self._run_trial = run_trial
        self._source = source
        self._rule = rule
        self._length = length
        self._on_trial = on_trial
        self._median_e2e_s = 0.0
        self.ended: list[Trial] = []

    def run(self, seed: int, rate_per_s: float) -> Trial:
        trial = self._run_once(rate_per_s, seed)
        while trial.is_sustained and self._is_too_short(trial):
            trial = self._run_once(rate_per_s, seed)
        self.ended.append(trial)
        if self._on_trial is not None:
            self._on_trial(trial)
        return trial

    def _run_once(self, rate_per_s: float, seed: int) -> Trial:
        load = self._length.load(rate_per_s, seed, self._median_e2e_s)
        workload = self._source.draw(rate_per_s, load.num_requests, seed)
        return self._rule.judge(load, self._run_trial(load, workload))

    def _is_too_short(self, trial: Trial) -> bool:
        """Whether a trial was too short; from then on, its median time sets the length."""
        median_e2e_s = trial.median_e2e_s or 0.0
        if _MEDIAN_E2E_TIMES * median_e2e_s <= trial.load.measured_s:
            return False
        self._median_e2e_s = median_e2e_s
        return True


def _search(
    run: Callable[[float], Trial], settings: SearchSettings, start_per_s: float, step: float
) -> Trial | None:
    """Return the sustained trial with the largest rate."""
    low, high_per_s = _bracket(run, settings.least_rate_per_s, start_per_s, step)
    while low is not None and low.rate_per_s * (1.0 + settings.precision) < high_per_s < math.inf:
        middle = run(math.sqrt(low.rate_per_s * high_per_s))
        if middle.is_sustained:
            low = middle
        else:
            high_per_s = middle.rate_per_s
    return low


def _bracket(
    run: Callable[[float], Trial], least_per_s: float, start_per_s: float, step: float
) -> tuple[Trial | None, float]:
    """Return a sustained trial and a larger rate that is not; None or infinity if not found.

    Steps widen until they are doublings.
    """
    trial = run(start_per_s)
    is_up = trial.is_sustained
    sustained, rate_per_s = trial if is_up else None, start_per_s
    reached = _FIRST_STEP ** (_MAX_UP if is_up else _MAX_DOWN)
    factor = 1.0
    while factor < reached:
        factor *= step
        step = min(step * step, _FIRST_STEP)
        following_per_s = start_per_s * factor if is_up else start_per_s / factor
        if following_per_s < least_per_s:
            break
        following = run(following_per_s)
        if following.is_sustained != is_up:
            return (sustained, following.rate_per_s) if is_up else (following, rate_per_s)
        sustained, rate_per_s = following if is_up else None, following.rate_per_s
    return (sustained, math.inf) if is_up else (None, rate_per_s)


def _capacity_per_s(sustained: Trial) -> float:
    """Take the rate of finished requests if smaller: chance may hide a slowly growing queue."""
    return min(sustained.rate_per_s, sustained.finished_per_s)
