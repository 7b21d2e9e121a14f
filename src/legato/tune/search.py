"""Searches the space of candidates in simulation.

Optuna suggests candidates (a tree-structured Parzen estimator, Bergstra et al., NeurIPS 2011) and
drops most after a part of the workload (successive halving, Li et al., arXiv:1810.05934). They come
in batches, so that one seed gives the same search whatever the number of processes.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import msgspec
import optuna

from legato.tune.candidate import Candidate, Space
from legato.tune.score import Figures
from legato.tune.trial import Problem, evaluate, saturate

_SHARES = (1 / 9, 1 / 3, 1.0)
_REDUCTION = 3
_BATCH = 12
_NUM_RUNS = 8
_NUM_CLOSE = 12
"""Of the best candidates, simulated several times."""

OnTrial = Callable[[int], None]
"""Told how many candidates have been tried."""


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate that was simulated on the whole workload."""

    candidate: Candidate
    figures: Figures


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: tried: the best first; num_trials: also of candidates that were dropped."""

    tried: list[Tried]
    num_trials: int


def search(
    problem: Problem,
    space: Space,
    *,
    num_trials: int,
    seed: int,
    num_processes: int,
    on_trial: OnTrial,
) -> SearchResult:
    """Try candidates, and those that come out best several times.

    Raises:
        ConfigError: the workload cannot be served on the machine at all.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=_REDUCTION),
    )
    known: dict[Candidate, Figures | None] = {}  # None where it was dropped
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        for first in range(0, num_trials, _BATCH):
            trials = [study.ask() for _ in range(min(_BATCH, num_trials - first))]
            _try(study, problem, space, trials, known, pool)
            on_trial(first + len(trials))
        whole = {candidate: figures for candidate, figures in known.items() if figures}
        return SearchResult(tried=_compare(problem, whole, pool), num_trials=num_trials)


def _try(
    study: optuna.Study,
    problem: Problem,
    space: Space,
    trials: Sequence[optuna.Trial],
    known: dict[Candidate, Figures | None],
    pool: Executor,
) -> None:
    """Simulate a batch on growing parts of the workload, as long as it is worth it."""
    candidates = {trial.number: space.suggest(trial) for trial in trials}
    left = []
    for trial in trials:
        if candidates[trial.number] in known:
            # The same again: a study learns nothing from it.
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            known[candidates[trial.number]] = None
            left.append(trial)
    for rung, share in enumerate(_SHARES):
        run = partial(evaluate, problem, share=share, num_runs=1)
        results = list(pool.map(run, [candidates[trial.number] for trial in left]))
        for trial, figures in zip(left, results, strict=True):
            trial.report(figures.score, rung + 1)
        if share == _SHARES[-1]:
            for trial, figures in zip(left, results, strict=True):
                known[candidates[trial.number]] = figures
                study.tell(trial, figures.score)
            return
        dropped = [trial for trial in left if trial.should_prune()]
        for trial in dropped:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        left = [trial for trial in left if trial not in dropped]


def _compare(problem: Problem, whole: dict[Candidate, Figures], pool: Executor) -> list[Tried]:
    """The best ones again with other random errors, and everybody's throughput."""
    ranked = sorted(whole, key=lambda candidate: whole[candidate].score, reverse=True)
    close = ranked[:_NUM_CLOSE]
    again = pool.map(partial(evaluate, problem, share=1.0, num_runs=_NUM_RUNS), close)
    figures = whole | dict(zip(close, again, strict=True))
    saturated = dict(zip(ranked, pool.map(partial(saturate, problem), ranked), strict=True))
    tried = [
        Tried(
            candidate=candidate,
            figures=msgspec.structs.replace(
                figures[candidate], saturated_tokens_per_s=saturated[candidate]
            ),
        )
        for candidate in ranked
    ]
    # Those simulated several times stay in front: one run's luck does not count.
    return [
        *sorted(tried[: len(close)], key=lambda one: one.figures.score, reverse=True),
        *tried[len(close) :],
    ]
