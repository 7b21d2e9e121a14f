"""Finds the best split of several machines: all do both, or some only compute prompts.

Machines that only compute prompts have no streams to protect, and machines that only decode have no
prompts to place: each kind has its own settings, searched one after the other.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

import msgspec

from legato.core.errors import ConfigError
from legato_lab.simulation.fleet import SimulatedFleet, Split
from legato_lab.simulation.fleet_run import simulate_fleet
from legato_lab.simulation.link import SimulatedLink
from legato_lab.simulation.machine import MeasuredServer
from legato_lab.simulation.summary import summarize
from legato_lab.simulation.workload import stretched
from legato_lab.tune.candidate import Candidate, Space
from legato_lab.tune.pool import simulators
from legato_lab.tune.score import Figures
from legato_lab.tune.trial import Problem

LOADS = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Multiples of the workload's own rate at which splits are compared."""

_SEARCHED_LOAD = 1.4
"""The load at which a split's settings are compared: high enough for them to matter."""

_LEAST_BUDGET = 512
"""The smallest token budget to try on a machine that only computes prompts."""

_SERVED = 0.99
"""Share of requests that attain their SLO if a load counts as served."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The machines to split.

    Attributes:
        kv_token_bytes: of a token's keys and values; None keeps prefill and decode together.
    """

    num_replicas: int = 1
    link: SimulatedLink = SimulatedLink()
    kv_token_bytes: float | None = None

    @property
    def splits(self) -> list[Split]:
        """All splits of the machines."""
        num = self.num_replicas
        apart = [Split(prefill=num - k, decode=k) for k in range(1, num)]
        return [Split(both=num), *(apart if self.kv_token_bytes else [])]


class SplitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a split's machines.

    Attributes:
        prefill: of machines that only compute prompts; None if there are none.
        others: of machines that decode.
    """

    prefill: Candidate | None
    others: Candidate


class SplitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a split at one load. Attributes: `load`: of `LOADS`."""

    split: str
    is_apart: bool
    load: float
    figures: Figures
    settings: SplitSettings


def compare_splits(
    problem: Problem,
    candidate: Candidate,
    space: Space,
    fleet: Fleet,
    *,
    num_processes: int,
    on_split: Callable[[int], None],
) -> list[SplitFigures]:
    """Simulate every split at every load.

    Args:
        candidate: the settings of a machine that does both; the search for the others starts from
            them.
        space: of the others' settings.
        on_split: called with the number of splits done.

    Raises:
        ConfigError: all requests of the workload come at once, so that it has no rate.
    """
    if not problem.workload[-1].arrival_s:
        raise ConfigError("splits are compared at rates, but all requests come at once")
    found: list[SplitFigures] = []
    with simulators(num_processes) as pool:
        for num_done, split in enumerate(fleet.splits, start=1):
            settings = SplitSettings(prefill=None, others=candidate)
            if split.prefill:
                settings = _search(partial(_run, problem, fleet, split), candidate, space, pool)
            loads = [(settings, load) for load in LOADS]
            found += pool.map(partial(_run, problem, fleet, split), loads)
            on_split(num_done)
    return found


def prefill_candidates(candidate: Candidate, space: Space) -> list[Candidate]:
    """Vary budget and order: without streams, steps are as long as their budget."""
    steps = "fixed" if "fixed" in space.steps else candidate.steps
    return [
        msgspec.structs.replace(
            candidate,
            steps=steps,
            pace=1.0,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_order=prefill_order,
        )
        for max_num_batched_tokens in space.max_num_batched_tokens
        if max_num_batched_tokens >= min(_LEAST_BUDGET, max(space.max_num_batched_tokens))
        for prefill_order in space.prefill_order
    ]


def decode_candidates(candidate: Candidate, space: Space) -> list[Candidate]:
    """Vary the number of streams: without prompts, only that matters."""
    return [
        msgspec.structs.replace(candidate, max_num_seqs=max_num_seqs)
        for max_num_seqs in space.max_num_seqs
    ]


def _search(
    run: Callable[[tuple[SplitSettings, float]], SplitFigures],
    candidate: Candidate,
    space: Space,
    pool: Executor,
) -> SplitSettings:
    """Return the settings of highest goodput: first for decoding, then for computing prompts."""
    prefills = prefill_candidates(candidate, space)

    def best(choices: Sequence[SplitSettings]) -> SplitSettings:
        found = pool.map(run, [(choice, _SEARCHED_LOAD) for choice in choices])
        return max(found, key=lambda one: one.figures.goodput_per_s).settings

    others = [
        SplitSettings(prefill=prefills[-1], others=other)
        for other in decode_candidates(candidate, space)
    ]
    generating = best(others).others
    return best([SplitSettings(prefill=prefill, others=generating) for prefill in prefills])


def served_load(figures: Sequence[SplitFigures], split: str) -> float:
    """Return the largest load up to which a split keeps its promises; 0 if there is none."""
    served = 0.0
    for one in sorted((f for f in figures if f.split == split), key=lambda f: f.load):
        if one.figures.attainment < _SERVED:
            break
        served = one.load
    return served


def best_split(figures: Sequence[SplitFigures]) -> str:
    """Return the split that serves the largest load; of equals, with the highest total goodput."""

    def place(split: str) -> tuple[float, float]:
        goodput = sum(f.figures.goodput_per_s for f in figures if f.split == split)
        return served_load(figures, split), goodput

    return max(dict.fromkeys(f.split for f in figures), key=place)


def verdict(figures: Sequence[SplitFigures]) -> str:
    """Say at which loads separate prefill and decode beat chunked prefill alone."""
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
    problem: Problem, fleet: Fleet, split: Split, case: tuple[SplitSettings, float]
) -> SplitFigures:
    settings, load = case
    prefill = settings.prefill
    simulated = SimulatedFleet(
        server=_server(problem, settings.others),
        prefill=None if prefill is None else _server(problem, prefill),
        split=split,
        link=fleet.link,
        kv_token_bytes=fleet.kv_token_bytes,
    )
    run = simulate_fleet(simulated, stretched(problem.workload, 1.0 / load))
    return SplitFigures(
        split=str(split),
        is_apart=split.prefill > 0,
        load=load,
        figures=Figures.mean([summarize(run.records, problem.slos)], problem.slos),
        settings=settings,
    )


def _server(problem: Problem, candidate: Candidate) -> MeasuredServer:
    return MeasuredServer(
        machine=problem.machine,
        scheduler=candidate.configure(problem.goal),
        enable_prefix_caching=problem.enable_prefix_caching,
        acceptance=problem.acceptance,
    )
