"""Tuning from end to end: measure, record, search, verify."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from legato.bench.console import step_bar
from legato.bench.machine import Machine, read_machine, write_machine
from legato.bench.prompts import RandomPrompts
from legato.bench.record import RequestRecord
from legato.bench.summary import Slos, summarize
from legato.bench.workload import Workload, cut_to, within
from legato.core.config import EngineConfig
from legato.core.slo import INTERACTIVE
from legato.tune.budget_table import BudgetRow, budget_rows
from legato.tune.candidate import Candidate, Space
from legato.tune.front import pareto_front
from legato.tune.lead import lead
from legato.tune.measure import IdleMachine, TypicalLoad, measure_idle
from legato.tune.real import record_real, run_real
from legato.tune.report import Finalist, TuneReport
from legato.tune.score import score
from legato.tune.search import SearchResult, Tried, search
from legato.tune.serve_flags import serve_flags
from legato.tune.trial import Problem, evaluate

Tell = Callable[[str], None]
"""Told what is being done."""


class TuneConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to tune.

    Attributes:
        engine: its settings that are not searched; its promises are the SLOs to keep.
        given: settings of the scheduler that were given; key a field of `SchedulerConfig`.
        num_trials: candidates to simulate.
        num_finalists: candidates to run on the machine; with 0 nothing is.
        record_s, verify_s: of the workload, to learn the machine from and to run finalists with.
        machine: a file of an earlier tuning to take the machine from, instead of measuring it.
        vocab_size: prompts are random tokens below this.
        output: the folder that the machine is kept in.
    """

    engine: EngineConfig
    given: dict[str, Any]
    num_trials: int
    num_finalists: int
    record_s: float
    verify_s: float
    machine: Path | None
    vocab_size: int
    num_processes: int
    seed: int
    output: Path


class _Measured(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    load: TypicalLoad | None = None
    budgets: list[BudgetRow] = []
    wall_s: float = 0.0


def tune(
    config: TuneConfig, workload: Workload, settings: dict[str, Any], tell: Tell
) -> TuneReport:
    """Find the settings under which a workload has the highest goodput.

    Args:
        workload: not cut to the model's context.
        settings: for the report; key a flag's name.

    Raises:
        ConfigError: what is set contradicts itself, the model, the machine or the workload.
        UnsupportedModelError: a checkpoint that cannot be run.
    """
    goal = config.engine.scheduler
    slos = Slos(default=goal.classes[INTERACTIVE], by_class=goal.classes)
    measured = _measure(config, workload, tell)
    machine = measured.machine
    workload = cut_to(workload, machine.max_model_len)
    problem = Problem(machine=machine, workload=workload, goal=goal, slos=slos)
    space = Space.around(goal, config.given, machine.max_model_len)
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
    finalists, records, verify_s = _verify(config, problem, found, tell)
    return TuneReport(
        settings=settings,
        slo=slos.default,
        load=measured.load,
        budgets=measured.budgets,
        machine_s=measured.wall_s + verify_s,
        search_s=search_s,
        space_size=space.size,
        num_trials=found.num_trials,
        tried=found.tried,
        front=pareto_front(found.tried),
        finalists=finalists,
        leads=[lead(records[0], other, slos, config.seed) for other in records[1:]],
    )


def _measure(config: TuneConfig, workload: Workload, tell: Tell) -> _Measured:
    if config.machine is not None:
        return _Measured(machine=read_machine(config.machine))
    started_s = time.monotonic()
    tell("measuring the idle engine")
    idle = measure_idle(config.engine, workload)
    part = cut_to(within(workload, config.record_s), idle.machine.max_model_len)
    tell(f"recording {len(part)} requests on the real engine")
    machine = _learn(config, idle, part)
    write_machine(config.output / "machine.json", machine)
    itl_slo_s = config.engine.scheduler.itl_slo_s
    return _Measured(
        machine=machine,
        load=idle.load,
        budgets=budget_rows(machine, idle.load, idle.budgets, itl_slo_s),
        wall_s=time.monotonic() - started_s,
    )


def _learn(config: TuneConfig, idle: IdleMachine, workload: Workload) -> Machine:
    """The machine beside a server and its clients, from a recorded run."""
    prompts = RandomPrompts(vocab_size=config.vocab_size, seed=config.seed)
    run, recording = record_real(config.engine, workload, prompts, "recording")
    return Machine.fit(
        idle.machine.belief,
        recording.measured_steps(),
        delays=recording.delays(run.records, run.start_s),
        max_model_len=idle.machine.max_model_len,
        kv_cache_tokens=idle.machine.kv_cache_tokens,
    )


def _verify(
    config: TuneConfig, problem: Problem, found: SearchResult, tell: Tell
) -> tuple[list[Finalist], list[list[RequestRecord]], float]:
    """The finalists, the best first; their records and the seconds on the machine, if any."""
    part = within(problem.workload, config.verify_s)
    problem = msgspec.structs.replace(problem, workload=part)
    finalists = []
    for place, one in enumerate(different(found.tried, max(1, config.num_finalists))):
        finalists.append(_finalist(config, problem, one.candidate, chr(ord("A") + place)))
    if not config.num_finalists:
        return finalists, [], 0.0
    started_s = time.monotonic()
    runs = [(finalist, _run(config, finalist, part, tell)) for finalist in finalists]
    judged = []
    for finalist, records in runs:
        summary = summarize(records, problem.slos)
        measured_score = score(summary, problem.slos)
        judged.append(
            (
                msgspec.structs.replace(finalist, measured=summary, measured_score=measured_score),
                records,
            )
        )
    judged.sort(key=lambda one: one[0].measured_score or 0.0, reverse=True)
    wall_s = time.monotonic() - started_s
    return [one for one, _ in judged], [records for _, records in judged], wall_s


def different(tried: Sequence[Tried], most: int) -> list[Tried]:
    """The first candidates that came to different figures: others differ in what never mattered."""
    kept: dict[tuple[float, float, float], Tried] = {}
    for one in tried:
        figures = one.figures
        key = (figures.goodput_per_s, figures.itl_p99_s, figures.ttft_p99_s)
        kept.setdefault(key, one)
    return list(kept.values())[:most]


def _finalist(config: TuneConfig, problem: Problem, candidate: Candidate, name: str) -> Finalist:
    engine = msgspec.structs.replace(config.engine, scheduler=candidate.configure(problem.goal))
    return Finalist(
        name=name,
        candidate=candidate,
        flags=serve_flags(engine),
        predicted=evaluate(problem, candidate, 1.0, 8),
    )


def _run(
    config: TuneConfig, finalist: Finalist, workload: Workload, tell: Tell
) -> list[RequestRecord]:
    tell(f"running finalist {finalist.name} on the real engine")
    engine = msgspec.structs.replace(
        config.engine, scheduler=finalist.candidate.configure(config.engine.scheduler)
    )
    prompts = RandomPrompts(vocab_size=config.vocab_size, seed=config.seed)
    return run_real(engine, workload, prompts, finalist.name).records
