"""The result of a tuning, written as JSON; `tables.py` and `plots.py` show it."""

from typing import Any

import msgspec

from legato.core.slo import SloClass
from legato_lab.simulation.summary import Summary
from legato_lab.tune.budget_table import BudgetRow
from legato_lab.tune.candidate import Candidate
from legato_lab.tune.lead import Lead
from legato_lab.tune.measure import TypicalLoad
from legato_lab.tune.score import Figures
from legato_lab.tune.search import Tried
from legato_lab.tune.splits import SplitFigures
from legato_lab.workload.notes import WorkloadNotes


class Finalist(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate worth a run on the machine.

    Attributes:
        flags: of `legato serve`.
        predicted: for the part of the workload that was run.
        measured: None if it was not run.
        measured_score: as `Figures.score`.
    """

    name: str
    candidate: Candidate
    flags: list[str]
    predicted: Figures
    measured: Summary | None = None
    measured_score: float | None = None


class TuneReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one tuning.

    Attributes:
        settings: of the run; key a flag's name.
        notes: what the workload lacks.
        slo: of requests that name no class.
        load, budgets: None and empty if the machine was not measured anew.
        machine_s: time on the real engine, for all measurements and verification.
        search_s: time in simulation.
        space_size: number of different candidates.
        tried: candidates simulated on the whole workload, the best first.
        front: those on the Pareto front of throughput, ITL and TTFT.
        finalists: the recommended one first.
        splits: of several machines; empty if there is only one.
        leads: of the first finalist over each of the others, as measured.
    """

    settings: dict[str, Any]
    notes: WorkloadNotes
    slo: SloClass
    load: TypicalLoad | None
    budgets: list[BudgetRow]
    machine_s: float
    search_s: float
    space_size: int
    num_trials: int
    tried: list[Tried]
    front: list[Tried]
    finalists: list[Finalist]
    splits: list[SplitFigures]
    leads: list[Lead]
