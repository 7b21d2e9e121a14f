"""Tables of a tuning's results, for the terminal and the page."""

from collections.abc import Sequence

from legato.cli.table import Table, duration
from legato.observe.distribution import Distribution
from legato_lab.report.tables import notes_table
from legato_lab.tune.budget_table import BudgetRow, largest_budget
from legato_lab.tune.candidate import Candidate
from legato_lab.tune.report import Finalist, TuneReport
from legato_lab.tune.search import Tried
from legato_lab.tune.splits import LOADS, SplitFigures, served_load

_NOTHING = "–"
_MEASURED = "  measured"
_MOST_SHOWN = 12


def tune_tables(report: TuneReport) -> list[Table]:
    """Return workload notes, finalists, Pareto front, splits, step time by budget.

    Empty tables are left out.
    """
    notes = notes_table([("", report.notes)])
    found = [notes] if notes.rows else []
    found += [_finalists(report.finalists), _front(report.front)]
    if report.splits:
        found += [_splits(report.splits), _split_settings(report.splits)]
    if report.load is not None:
        found.append(_budgets(report.budgets, report))
    return found


def describe(candidate: Candidate) -> str:
    """Describe a candidate in one line."""
    told = [
        f"slo x {candidate.pace:g}" if candidate.steps == "slo" else candidate.steps,
        f"{candidate.max_num_batched_tokens} tokens",
        f"{candidate.max_num_seqs} running",
        candidate.prefill_order,
    ]
    if candidate.shed_load:
        told.append("shedding")
    if candidate.speculative is not None:
        told.append(f"speculative {candidate.speculative}")
    return ", ".join(told)


def certainty(report: TuneReport) -> str:
    """Describe how certain it is that the first finalist is the best."""
    if not report.leads:
        return "Nothing was run on the machine: this is what simulation says."
    if all(lead.is_sure for lead in report.leads):
        return "Its lead exceeds the noise between requests."
    nearest = min(report.leads, key=lambda lead: lead.probability)
    return (
        f"Its lead is within the noise: over the nearest other finalist it is "
        f"{nearest.of_goodput:+.1%} of goodput, [{nearest.low:+.1%}, {nearest.high:+.1%}] for "
        f"95 % of resamples, and it leads in {nearest.probability:.0%} of them."
    )


def _splits(figures: Sequence[SplitFigures]) -> Table:
    """Return shares of requests that attained their SLO, a row a split, a column a load."""
    attained = {(f.split, f.load): f"{f.figures.attainment:.1%}" for f in figures}
    return Table(
        "Splits: SLO attained, by load relative to the workload's",
        ["", *(f"{load:g}x" for load in LOADS), "serves"],
        [
            [split, *(attained[split, load] for load in LOADS), f"{served_load(figures, split):g}x"]
            for split in dict.fromkeys(f.split for f in figures)
        ],
    )


def _split_settings(figures: Sequence[SplitFigures]) -> Table:
    """Return the settings of each split's machines, a row a split."""
    settings = {f.split: f.settings for f in figures}
    return Table(
        "Splits: settings",
        ["", "compute prompts", "generate"],
        [
            [split, describe(one.prefill) if one.prefill else _NOTHING, describe(one.others)]
            for split, one in settings.items()
        ],
    )


def _finalists(finalists: Sequence[Finalist]) -> Table:
    """Return each figure as simulated and, below that, as measured."""
    predicted = [finalist.predicted for finalist in finalists]
    measured = [finalist.measured for finalist in finalists]
    rows = [
        ["", *(describe(finalist.candidate) for finalist in finalists)],
        [
            "goodput, requests/s",
            *(f"{p.goodput_per_s:.3f} ± {p.score_error:.3f}" for p in predicted),
        ],
        [_MEASURED, *(f"{m.goodput_per_s:.3f}" if m else _NOTHING for m in measured)],
        ["SLO attained", *(f"{p.attainment:.1%}" for p in predicted)],
        [_MEASURED, *(f"{m.attainment:.1%}" if m else _NOTHING for m in measured)],
        ["ITL p99", *(duration(p.itl_p99_s) for p in predicted)],
        [_MEASURED, *(_p99(m.itl_s if m else None) for m in measured)],
        ["TTFT p99", *(duration(p.ttft_p99_s) for p in predicted)],
        [_MEASURED, *(_p99(m.ttft_s if m else None) for m in measured)],
    ]
    title = "Finalists, simulated and measured"
    return Table(title, ["", *(finalist.name for finalist in finalists)], rows)


def _front(front: Sequence[Tried]) -> Table:
    rows = [
        [
            describe(one.candidate),
            f"{one.figures.saturated_tokens_per_s or 0.0:.0f}",
            duration(one.figures.itl_p99_s),
            duration(one.figures.ttft_p99_s),
            f"{one.figures.goodput_per_s:.3f}",
        ]
        for one in front[:_MOST_SHOWN]
    ]
    header = ["", "tokens/s saturated", "ITL p99", "TTFT p99", "goodput, requests/s"]
    return Table("Pareto front, in simulation", header, rows)


def _budgets(budgets: Sequence[BudgetRow], report: TuneReport) -> Table:
    load = report.load
    assert load is not None
    largest = largest_budget(budgets)
    rows = [
        [
            f"{row.num_tokens} tokens" + (" (largest inside)" if row.num_tokens == largest else ""),
            duration(row.measured_s),
            duration(row.fitted_s),
            duration(row.served_s),
            duration(row.served_p99_s),
            _NOTHING if row.keeps_slo is None else "yes" if row.keeps_slo else "no",
        ]
        for row in budgets
    ]
    title = (
        f"A step's time by token budget, beside {load.num_streams} streams of {load.context} "
        f"tokens, at token {load.start} of a prompt"
    )
    header = ["", "idle, measured", "fitted", "serving, fitted", "its p99", "inside the ITL SLO"]
    return Table(title, header, rows)


def _p99(values: Distribution | None) -> str:
    return duration(values.p99 if values else None)
