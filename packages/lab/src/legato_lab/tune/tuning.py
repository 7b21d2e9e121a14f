"""Tuning from end to end: measure, record, search, verify."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from legato.core.config import EngineConfig
from legato.core.serve_flags import serve_flags
from legato.core.slo import INTERACTIVE
from legato.engine.assembly.blueprint import model_context
from legato_lab.report.console import step_bar
from legato_lab.simulation.drafts import Acceptance
from legato_lab.simulation.machine_file import load_machine, write_machine
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.summary import Slos, summarize
from legato_lab.simulation.workload import RandomPrompts, Workload, within
from legato_lab.tune.candidate import Candidate, Space, check_goal
from legato_lab.tune.front import pareto_front
from legato_lab.tune.lead import lead
from legato_lab.tune.learn import Learned, Tell, learn
from legato_lab.tune.real import run_real
from legato_lab.tune.report import Finalist, TuneReport
from legato_lab.tune.score import score
from legato_lab.tune.search import SearchResult, Tried, search
from legato_lab.tune.splits import Fleet, SplitFigures, compare_splits
from legato_lab.tune.trial import Problem, evaluate
from legato_lab.workload.notes import NO_NOTES, WorkloadNotes

_NUM_RUNS = 8
"""Number of simulations of a finalist."""


class TuneConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a tuning.

    Attributes:
        engine: its settings that are not searched; its promises are the SLOs to keep.
        given: settings of the scheduler that were given; key a field of `SchedulerConfig`.
        num_trials: candidates to simulate.
        num_finalists: candidates to run on the machine; 0 runs none.
        record_s, verify_s: parts of the workload for measuring the machine and for running
            finalists.
        machine: the name or file of a profile, used instead of measuring the machine.
        acceptance: how often drafts are accepted; None drafts nothing in simulation, and searches
            no `speculative`.
        vocab_size: prompts are random tokens below this.
        fleet: machines that share the workload; the search finds settings for one of them with its
            part of the requests.
        output: the folder for the machine's profile.
    """

    engine: EngineConfig
    given: dict[str, Any]
    num_trials: int
    num_finalists: int
    record_s: float
    verify_s: float
    machine: str | None
    acceptance: Acceptance | None = None
    vocab_size: int
    num_processes: int
    seed: int
    fleet: Fleet = Fleet()
    output: Path


def tuned_context(config: TuneConfig) -> int:
    """Return the longest prompt plus output in tokens for a workload.

    Raises:
        ConfigError: the machine cannot be read, or there is no such model.
        UnsupportedModelError: a checkpoint that cannot be run.
    """
    if config.machine is not None:
        return load_machine(config.machine).max_model_len
    return model_context(config.engine.model)


def tune(
    config: TuneConfig,
    workload: Workload,
    settings: dict[str, Any],
    tell: Tell,
    notes: WorkloadNotes = NO_NOTES,
) -> TuneReport:
    """Find the settings under which a workload has the highest goodput.

    Args:
        workload: fits into `tuned_context`.
        settings: for the report; key a flag's name.
        notes: for the report; what the workload lacks.

    Raises:
        ConfigError: the settings contradict each other, the model, the machine or the workload.
        UnsupportedModelError: a checkpoint that cannot be run.
    """
    goal = config.engine.scheduler
    check_goal(goal)
    slos = Slos(default=goal.classes[INTERACTIVE], by_class=goal.classes)
    learned: Learned | None = None
    if config.machine is None:
        learned = _learn(config, workload, tell)
        machine = learned.machine
    else:
        machine = load_machine(config.machine)
    problem = Problem(
        machine=machine,
        workload=workload,
        goal=goal,
        slos=slos,
        enable_prefix_caching=config.engine.cache.enable_prefix_caching,
        acceptance=config.acceptance,
    )
    whole = problem
    # Every nth request: a router spreads requests more evenly, but in the same proportion.
    part = workload[:: config.fleet.num_replicas]
    problem = msgspec.structs.replace(problem, workload=part)
    space = Space.around(
        goal, config.given, machine.max_model_len, drafts=config.acceptance is not None
    )
    tell(f"trying {config.num_trials} of {space.size:,} candidates in simulation")
    started_s = time.monotonic()
    with step_bar("trials", config.num_trials) as on_trial:
        found = search(
            problem,
            space,
            num_trials=config.num_trials,
            seed=config.seed,
            num_processes=config.num_processes,
            on_trial=on_trial,
        )
    search_s = time.monotonic() - started_s
    splits = _compare_splits(config, whole, space, found, tell)
    finalists = _finalists(config, problem, found)
    records: list[list[RequestRecord]] = []
    started_s = time.monotonic()
    if config.num_finalists:
        finalists, records = _verify(config, problem, finalists, tell)
    verify_s = time.monotonic() - started_s if config.num_finalists else 0.0
    return TuneReport(
        settings=settings,
        notes=notes,
        slo=slos.default,
        load=learned.load if learned else None,
        budgets=learned.budgets if learned else [],
        machine_s=(learned.wall_s if learned else 0.0) + verify_s,
        search_s=search_s,
        space_size=space.size,
        num_trials=found.num_trials,
        tried=found.tried,
        front=pareto_front(found.tried),
        finalists=finalists,
        splits=splits,
        leads=[lead(records[0], other, slos, config.seed) for other in records[1:]],
    )


def _learn(config: TuneConfig, workload: Workload, tell: Tell) -> Learned:
    prompts = RandomPrompts(vocab_size=config.vocab_size, seed=config.seed)
    learned = learn(config.engine, within(workload, config.record_s), prompts, tell)
    write_machine(config.output / "machine.json", learned.machine, learned.about)
    return learned


def _compare_splits(
    config: TuneConfig, problem: Problem, space: Space, found: SearchResult, tell: Tell
) -> list[SplitFigures]:
    fleet = config.fleet
    if fleet.num_replicas == 1:
        return []
    tell(f"simulating {len(fleet.splits)} splits of {fleet.num_replicas} machines")
    with step_bar("splits", len(fleet.splits)) as on_split:
        return compare_splits(
            problem,
            found.tried[0].candidate,
            space,
            fleet,
            num_processes=config.num_processes,
            on_split=on_split,
        )


def _finalists(config: TuneConfig, problem: Problem, found: SearchResult) -> list[Finalist]:
    """Return the best candidates, at least one, with predictions for their runs."""
    part = within(problem.workload, config.verify_s)
    problem = msgspec.structs.replace(problem, workload=part)
    return [
        Finalist(
            name=chr(ord("A") + place),
            candidate=one.candidate,
            flags=serve_flags(_engine(config, one.candidate)),
            predicted=evaluate(problem, one.candidate, 1.0, _NUM_RUNS),
        )
        for place, one in enumerate(different(found.tried, max(1, config.num_finalists)))
    ]


def _verify(
    config: TuneConfig, problem: Problem, finalists: Sequence[Finalist], tell: Tell
) -> tuple[list[Finalist], list[list[RequestRecord]]]:
    """Run the finalists on the real engine; return them and their records, the best first."""
    part = within(problem.workload, config.verify_s)
    runs = []
    for finalist in finalists:
        tell(f"running finalist {finalist.name} on the real engine")
        prompts = RandomPrompts(vocab_size=config.vocab_size, seed=config.seed)
        run = run_real(_engine(config, finalist.candidate), part, prompts, finalist.name)
        summary = summarize(run.records, problem.slos)
        verified = msgspec.structs.replace(
            finalist, measured=summary, measured_score=score(summary, problem.slos)
        )
        runs.append((verified, run.records))
    runs.sort(key=lambda run: run[0].measured_score or 0.0, reverse=True)
    return [finalist for finalist, _ in runs], [records for _, records in runs]


def different(tried: Sequence[Tried], most: int) -> list[Tried]:
    """Return the first candidates with different figures: others differ only in unused settings."""
    kept: dict[tuple[float, float, float], Tried] = {}
    for one in tried:
        figures = one.figures
        key = (figures.goodput_per_s, figures.itl_p99_s, figures.ttft_p99_s)
        kept.setdefault(key, one)
    return list(kept.values())[:most]


def _engine(config: TuneConfig, candidate: Candidate) -> EngineConfig:
    scheduler = candidate.configure(config.engine.scheduler)
    return msgspec.structs.replace(config.engine, scheduler=scheduler)
