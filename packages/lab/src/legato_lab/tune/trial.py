"""Simulates one candidate."""

import math

import msgspec

from legato.core.config import SchedulerConfig
from legato_lab.simulation.drafts import Acceptance
from legato_lab.simulation.machine import Machine, MeasuredServer
from legato_lab.simulation.simulated_run import simulate
from legato_lab.simulation.summary import Slos, Summary, summarize
from legato_lab.simulation.workload import Workload, mean_rate_per_s, rescaled, within
from legato_lab.tune.candidate import Candidate
from legato_lab.tune.score import Figures

_SATURATION = 4.0


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """The workload and the machine to tune for.

    Attributes:
        goal: the scheduler's settings that are not searched, with the SLOs to keep.
        slos: for judging requests.
        enable_prefix_caching: whether prompts share cached blocks.
        acceptance: how often drafts are accepted; None drafts nothing.
    """

    machine: Machine
    workload: Workload
    goal: SchedulerConfig
    slos: Slos
    enable_prefix_caching: bool = True
    acceptance: Acceptance | None = None


def evaluate(problem: Problem, candidate: Candidate, share: float, num_runs: int) -> Figures:
    """Simulate a candidate.

    Args:
        share: of the workload, from its beginning.
        num_runs: with different errors of steps.
    """
    duration_s = share * problem.workload[-1].arrival_s
    part = problem.workload if share >= 1.0 else within(problem.workload, duration_s)
    # A workload whose requests all come at once cannot be cut by time.
    summaries = [_run(problem, candidate, part or problem.workload, run) for run in range(num_runs)]
    return Figures.mean(summaries, problem.slos)


def saturate(problem: Problem, candidate: Candidate) -> float:
    """Return tokens a second when requests come several times as fast, in simulation."""
    hurried, rate_per_s = problem.workload, mean_rate_per_s(problem.workload)
    if math.isfinite(rate_per_s):
        hurried = rescaled(hurried, _SATURATION * rate_per_s)
    return _run(problem, candidate, hurried, 0).total_tokens_per_s


def _run(problem: Problem, candidate: Candidate, workload: Workload, seed: int) -> Summary:
    server = MeasuredServer(
        machine=problem.machine,
        scheduler=candidate.configure(problem.goal),
        enable_prefix_caching=problem.enable_prefix_caching,
        acceptance=problem.acceptance,
        seed=seed,
    )
    return summarize(simulate(server, workload).records, problem.slos)
