"""Searches the space of candidates in simulation.

Optuna suggests candidates (a tree-structured Parzen estimator, Bergstra et al., NeurIPS 2011) and
drops most after a part of the workload (successive halving, Li et al., arXiv:1810.05934). They come
in batches, so that one seed gives the same search with any number of processes.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

import msgspec
import optuna
from optuna.trial import TrialState

from legato_lab.tune.candidate import Candidate, Space
from legato_lab.tune.pool import simulators
from legato_lab.tune.score import Figures
from legato_lab.tune.trial import Problem, evaluate, saturate

_SHARES = (1 / 9, 1 / 3, 1.0)
_REDUCTION = 3
_BATCH = 12
_NUM_RUNS = 8
_NUM_CLOSE = 12
"""The number of best candidates that are simulated several times."""

OnTrial = Callable[[int], None]
"""Called with the number of candidates tried so far."""


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate that was simulated on the whole workload."""

    candidate: Candidate
    figures: Figures


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: tried: the best first; num_trials: including dropped candidates."""

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
    """Try candidates, and simulate the best of them several times.

    Raises:
        ConfigError: the machine could never serve the workload.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=_REDUCTION),
    )
    known: dict[Candidate, Figures | None] = {}  # None if dropped
    with simulators(num_processes) as pool:
        for first in range(0, num_trials, _BATCH):
            num_asked = min(_BATCH, num_trials - first)
            suggested = _suggest(study, space, num_asked, known)
            _try(study, problem, suggested, known, pool)
            on_trial(first + num_asked)
        whole = {candidate: figures for candidate, figures in known.items() if figures}
        return SearchResult(tried=_compare(problem, whole, pool), num_trials=num_trials)


def _try(
    study: optuna.Study,
    problem: Problem,
    left: dict[optuna.Trial, Candidate],
    known: dict[Candidate, Figures | None],
    pool: Executor,
) -> None:
    """Simulate a batch on growing parts of the workload, while it is worth it."""
    for rung, share in enumerate(_SHARES, start=1):
        run = partial(evaluate, problem, share=share, num_runs=1)
        results = dict(zip(left, pool.map(run, left.values()), strict=True))
        for trial, figures in results.items():
            trial.report(figures.score, rung)
        if rung < len(_SHARES):
            left = {trial: candidate for trial, candidate in left.items() if _goes_on(study, trial)}
            continue
        for trial, figures in results.items():
            known[left[trial]] = figures
            study.tell(trial, figures.score)


def _goes_on(study: optuna.Study, trial: optuna.Trial) -> bool:
    is_dropped = trial.should_prune()
    if is_dropped:
        study.tell(trial, state=TrialState.PRUNED)
    return not is_dropped


def _suggest(
    study: optuna.Study, space: Space, num_trials: int, known: dict[Candidate, Figures | None]
) -> dict[optuna.Trial, Candidate]:
    """Suggest new candidates and mark them known; the study learns nothing from known ones."""
    suggested = {}
    for _ in range(num_trials):
        trial = study.ask()
        candidate = space.suggest(trial)
        if candidate in known:
            study.tell(trial, state=TrialState.PRUNED)
        else:
            known[candidate] = None
            suggested[trial] = candidate
    return suggested


def _compare(problem: Problem, whole: dict[Candidate, Figures], pool: Executor) -> list[Tried]:
    """Simulate the best candidates again with other random errors, and saturate all of them."""
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
    # Candidates simulated several times stay in front: a single run may be luck.
    return [
        *sorted(tried[: len(close)], key=_place),
        *tried[len(close) :],
    ]


def _place(one: Tried) -> tuple[float, tuple[object, ...]]:
    """Sort by score; of equal candidates, smaller settings first."""
    return -one.figures.score, msgspec.structs.astuple(one.candidate)
