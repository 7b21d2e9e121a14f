"""Tables of reports for the terminal and the page.

A report is a column, or a row if there are many.
"""

from collections import Counter
from collections.abc import Sequence

from legato.cli.table import NOTHING, Table, duration
from legato.core.slo import SloClass, percentile
from legato.observe.distribution import Distribution, distribution
from legato_lab.capacity.rule import CapacityRule
from legato_lab.capacity.search import Capacity
from legato_lab.capacity.trial import Trial
from legato_lab.report.fleet_figures import replica_table
from legato_lab.report.report_file import (
    CapacityReport,
    ProbeReport,
    Report,
    RunReport,
    SweepReport,
    by_kind,
)
from legato_lab.report.sweep_table import sweep_table
from legato_lab.simulation.summary import Summary
from legato_lab.workload.notes import WorkloadNotes

__all__ = ["Table", "duration", "tables"]

_SHOWN = ("p50", "p99", "max")
_MAX_COLUMNS = 5
_MOST_FAILURES = 20

_Cells = dict[str, str]
"""One column: key the row's name."""


def tables(reports: Sequence[Report]) -> list[Table]:
    """Return a table for each kind of report, and the failures and trials of each report."""
    runs, capacities, probes, sweeps = by_kind(reports)
    loaded: list[RunReport | CapacityReport | SweepReport] = [*runs, *capacities, *sweeps]
    found = [
        notes_table([(report.name, report.notes) for report in loaded]),
        *_run_tables(runs),
        *_fleet_tables(runs),
        *map(_failure_table, runs),
        _table("Capacity", [(report.name, _capacity_cells(report)) for report in capacities]),
        *map(_trial_table, capacities),
        _table("Long prompts", [(report.name, _probe_cells(report)) for report in probes]),
        *map(sweep_table, sweeps),
        *(_failure_table(point.run) for sweep in sweeps for point in sweep.points),
    ]
    return [table for table in found if table.rows]


def notes_table(notes: Sequence[tuple[str, WorkloadNotes]]) -> Table:
    """Return what each report's workload lacks; no rows if nothing is missing."""
    columns = [(name, _notes_cells(one)) for name, one in notes if one.lines()]
    return _table("Workload, of which a part is missing", columns)


def _table(title: str, columns: Sequence[tuple[str, _Cells]]) -> Table:
    """Make a table with a column for each report, or a row if there are too many columns.

    Args:
        columns: header and cells of each, all with the same rows.
    """
    table = _side_by_side(title, columns)
    return table if len(columns) <= _MAX_COLUMNS else _transposed(table)


def _side_by_side(title: str, columns: Sequence[tuple[str, _Cells]]) -> Table:
    header = ["", *(name for name, _ in columns)]
    row_names = columns[0][1] if columns else {}
    return Table(title, header, [[row, *(cells[row] for _, cells in columns)] for row in row_names])


def _transposed(table: Table) -> Table:
    header, *rows = map(list, zip(table.header, *table.rows, strict=True))
    return Table(table.title, header, rows)


def _run_tables(runs: Sequence[RunReport]) -> list[Table]:
    """Return one table, or two of half the width if each report is a row."""
    columns = [column for run in runs for column in _run_columns(run)]
    if len(columns) <= _MAX_COLUMNS:
        return [_table("Runs", columns)]
    return [
        _table("Runs", [(name, _only_latencies(cells, False)) for name, cells in columns]),
        _table("Latencies", [(name, _only_latencies(cells, True)) for name, cells in columns]),
    ]


def _only_latencies(cells: _Cells, are_latencies: bool) -> _Cells:
    """Return the latencies among the cells, or the others."""
    return {name: text for name, text in cells.items() if name.endswith(_SHOWN) == are_latencies}


def _notes_cells(notes: WorkloadNotes) -> _Cells:
    too_long = notes.too_long
    return {
        "context, tokens": f"{too_long.max_model_len}" if too_long else NOTHING,
        "requests that were chosen": f"{too_long.num_requests}" if too_long else NOTHING,
        "of these too long and cut": f"{too_long.num_cut}" if too_long else "0",
        "of these too long and dropped": f"{too_long.num_dropped}" if too_long else "0",
        "prompt tokens missing": f"{too_long.share_of_tokens:.1%}" if too_long else "0.0%",
        "malformed rows skipped": str(notes.num_bad_rows),
        "rows without an answer": str(notes.num_unanswered),
    }


def _run_columns(report: RunReport) -> list[tuple[str, _Cells]]:
    default, by_class = report.slos.default, report.slos.by_class
    columns = [(report.name, _run_cells(report.summary, [default, *by_class.values()]))]
    for name, summary in report.by_class.items():
        columns.append((f"{report.name}: {name}", _run_cells(summary, [report.slos.of(name)])))
    return columns


def _run_cells(summary: Summary, slos: Sequence[SloClass]) -> _Cells:
    """Args: slos: of the requests; without promises, the SLO cells are empty."""
    counts = summary.num_requests
    are_promised = not all(slo.is_best_effort for slo in slos)
    return {
        "requests finished": str(counts.get("ok", 0)),
        "refused": str(counts.get("refused", 0)),
        "failed": str(counts.get("error", 0)),
        "duration": duration(summary.duration_s),
        "requests/s": f"{summary.requests_per_s:.2f}",
        "output tokens/s": f"{summary.output_tokens_per_s:.0f}",
        "total tokens/s": f"{summary.total_tokens_per_s:.0f}",
        "prompt tokens from the cache": _share(summary.cached_share),
        **_latency_cells("TTFT", summary.ttft_s),
        **_latency_cells("ITL", summary.itl_s),
        **_latency_cells("TPOT", summary.tpot_s),
        **_latency_cells("E2E", summary.e2e_s),
        "SLO attained": f"{summary.attainment:.1%}" if are_promised else NOTHING,
        "goodput, requests/s": f"{summary.goodput_per_s:.2f}" if are_promised else NOTHING,
    }


def _fleet_tables(runs: Sequence[RunReport]) -> list[Table]:
    fleets = [(run.name, run.fleet) for run in runs if run.fleet is not None]
    return [
        _table("Fleets", [(name, fleet.cells()) for name, fleet in fleets]),
        *(replica_table(f"Replicas: {name}", fleet.replicas) for name, fleet in fleets),
    ]


def _share(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.1%}"


def _failure_table(report: RunReport) -> Table:
    failures = Counter(report.failures)
    rows = [[error, str(count)] for error, count in failures.most_common(_MOST_FAILURES)]
    return Table(f"Failures: {report.name}", ["", "requests"], rows)


def _latency_cells(name: str, latency_s: Distribution | None) -> _Cells:
    values_s = (latency_s.p50, latency_s.p99, latency_s.max) if latency_s else (None, None, None)
    texts = map(duration, values_s)
    return {f"{name} {which}": text for which, text in zip(_SHOWN, texts, strict=True)}


def _trial_table(report: CapacityReport) -> Table:
    """Return the trials of one search by rate, a row each."""
    trials = sorted(report.capacity.trials, key=lambda trial: trial.rate_per_s)
    columns = [(f"{trial.rate_per_s:.3g}/s", _trial_cells(trial)) for trial in trials]
    return _transposed(_side_by_side(f"Trials: {report.name}", columns))


def _trial_cells(trial: Trial) -> _Cells:
    return {
        "seed": str(trial.load.seed),
        "measured": f"{trial.measured_s:.0f} s",
        "requests": str(trial.num_requests),
        "failed": str(trial.num_failed),
        "finished/s": f"{trial.finished_per_s:.3g}",
        "ITL p99": duration(trial.p99_itl_s),
        "longest gap": duration(trial.longest_itl_s),
        "attained": f"{trial.attainment:.1%}",
        "median delay": duration(trial.median_delay_s),
        "growth": duration(trial.delay_growth_s),
        "sustained": "yes" if trial.is_sustained else f"no: {', '.join(trial.broken)}",
    }


def _capacity_cells(report: CapacityReport) -> _Cells:
    capacity = report.capacity
    interval = capacity.interval_per_s
    return {
        "capacity, requests/s": _told_capacity(capacity),
        "95 % interval": NOTHING if interval is None else "{:.3g} to {:.3g}".format(*interval),
        **_rule_cells(capacity.rule),
        **_best_cells(capacity.best),
        "requests to draw from": str(capacity.num_source_requests),
        "seeds": str(len(capacity.rates_per_s)),
        "trials": str(len(capacity.trials)),
    }


def _told_capacity(capacity: Capacity) -> str:
    if capacity.rate_per_s > 0.0:
        return f"{capacity.rate_per_s:.3g}"
    return f"below {min(trial.rate_per_s for trial in capacity.trials):.3g}"


def _rule_cells(rule: CapacityRule) -> _Cells:
    of = "gaps" if rule.least_attainment is None else f"{rule.least_attainment:.4g} of requests"
    itl = f"{duration(rule.itl_slo_s)}, {percentile(rule.itl_slo_quantile)} of {of}"
    return {"ITL at most": itl, "median delay at most": duration(rule.max_delay_s)}


def _best_cells(best: Sequence[Trial]) -> _Cells:
    """Args: best: the best trial of each seed; of each figure, the worst is shown."""
    names = ("requests", "measured", "ITL p99", "longest gap", "SLO attained")
    if not best:
        return {f"{name} there": NOTHING for name in names}
    texts = (
        str(min(trial.num_requests for trial in best)),
        f"{min(trial.measured_s for trial in best):.0f} s",
        duration(max((trial.p99_itl_s or 0.0) for trial in best)),
        duration(max((trial.longest_itl_s or 0.0) for trial in best)),
        f"{min(trial.attainment for trial in best):.1%}",
    )
    return {f"{name} there": text for name, text in zip(names, texts, strict=True)}


def _probe_cells(report: ProbeReport) -> _Cells:
    result = report.result
    ttfts = ", ".join(duration(ttft_s) for ttft_s in sorted(result.long_ttfts_s))
    return {
        **_latency_cells("ITL before,", distribution(result.itl_s(during=False))),
        **_latency_cells("ITL during,", distribution(result.itl_s(during=True))),
        "tokens/s before": f"{result.tokens_per_s(during=False):.1f}",
        "tokens/s during": f"{result.tokens_per_s(during=True):.1f}",
        "TTFT of the long prompts": ttfts,
    }
