"""Which split of several machines serves a workload: all do both, or some only compute prompts."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import msgspec

from legato.bench.report.summary import summarize
from legato.bench.simulation.fleet import SimulatedFleet, Split
from legato.bench.simulation.fleet_run import simulate_fleet
from legato.bench.simulation.link import Link
from legato.bench.simulation.machine import MeasuredServer
from legato.bench.workload.requests import stretched
from legato.core.errors import ConfigError
from legato.tune.candidate import Candidate
from legato.tune.score import Figures
from legato.tune.trial import Problem

LOADS = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Of the workload's own rate, at which splits are compared."""

_SERVED = 0.99
"""Share of requests that attain their SLO where a load is said to be served."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The machines to be split.

    Attributes:
        kv_token_bytes: of a token's keys and values; None leaves prefill and decode together.
    """

    num_replicas: int = 1
    link: Link = Link()
    kv_token_bytes: float | None = None

    @property
    def splits(self) -> list[Split]:
        """All that there are of so many machines."""
        num = self.num_replicas
        apart = [Split(prefill=num - k, decode=k) for k in range(1, num)]
        return [Split(both=num), *(apart if self.kv_token_bytes else [])]


class SplitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the workload. Attributes: `load`: of `LOADS`."""

    split: str
    is_apart: bool
    load: float
    figures: Figures


def compare_splits(
    problem: Problem,
    candidate: Candidate,
    fleet: Fleet,
    *,
    num_processes: int,
    on_trial: Callable[[int], None],
) -> list[SplitFigures]:
    """Every split under every load, each machine with the settings of one candidate.

    Raises:
        ConfigError: all requests of the workload come at once, so that it has no rate.
    """
    if not problem.workload[-1].arrival_s:
        raise ConfigError("splits are compared at rates, but all requests come at once")
    cases = [(split, load) for split in fleet.splits for load in LOADS]
    run = partial(_run, problem, candidate, fleet)
    found: list[SplitFigures] = []
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        for figures in pool.map(run, cases):
            found.append(figures)
            on_trial(len(found))
    return found


def served_load(figures: Sequence[SplitFigures], split: str) -> float:
    """The largest load up to which a split keeps its promises; 0 where there is none."""
    served = 0.0
    for one in sorted((f for f in figures if f.split == split), key=lambda f: f.load):
        if one.figures.attainment < _SERVED:
            break
        served = one.load
    return served


def best_split(figures: Sequence[SplitFigures]) -> str:
    """Serves the largest load; of equals, has the highest goodput over all loads."""

    def place(split: str) -> tuple[float, float]:
        goodput = sum(f.figures.goodput_per_s for f in figures if f.split == split)
        return served_load(figures, split), goodput

    return max(dict.fromkeys(f.split for f in figures), key=place)


def verdict(figures: Sequence[SplitFigures]) -> str:
    """At which loads prefill and decode apart are better than chunked prefill alone."""
    if not any(f.is_apart for f in figures):
        return "Prefill and decode apart were not tried: nobody told what a token's blocks take."
    better: list[str] = []
    for load in LOADS:
        here = [f for f in figures if f.load == load]
        apart = max((f for f in here if f.is_apart), key=lambda f: f.figures.goodput_per_s)
        both = next(f for f in here if not f.is_apart)
        if apart.figures.goodput_per_s > both.figures.goodput_per_s:
            better.append(
                f"{load:g}x ({apart.split}: {apart.figures.attainment:.1%} attained, "
                f"{both.figures.attainment:.1%} together)"
            )
    if not better:
        return (
            "Chunked prefill alone is at least as good as prefill and decode apart, at all loads."
        )
    return f"Prefill and decode apart are better than chunked prefill alone at {', '.join(better)}."


def _run(
    problem: Problem, candidate: Candidate, fleet: Fleet, case: tuple[Split, float]
) -> SplitFigures:
    split, load = case
    server = MeasuredServer(
        machine=problem.machine,
        scheduler=candidate.configure(problem.goal),
        enable_prefix_caching=problem.enable_prefix_caching,
    )
    simulated = SimulatedFleet(
        server=server, split=split, link=fleet.link, kv_token_bytes=fleet.kv_token_bytes
    )
    run = simulate_fleet(simulated, stretched(problem.workload, 1.0 / load))
    figures = Figures.mean([summarize(run.records, problem.slos)], problem.slos)
    return SplitFigures(split=str(split), is_apart=split.prefill > 0, load=load, figures=figures)
