"""Reports as tables, one column a report, for the terminal and for the page."""

from collections import Counter
from collections.abc import Sequence

from legato.bench.report.report_file import CapacityReport, ProbeReport, Report, RunReport, by_kind
from legato.bench.report.summary import Distribution, Summary, distribution
from legato.bench.report.sweep_table import sweep_table
from legato.bench.report.table import NOTHING, Table, duration
from legato.core.slo import SloClass, percentile

__all__ = ["Table", "duration", "tables"]

_SHOWN = ("p50", "p99", "max")

_Cells = dict[str, str]
"""One column: key the row's name."""


def tables(reports: Sequence[Report]) -> list[Table]:
    """One for each kind of report that there is, and the failures and trials of each report."""
    runs, capacities, probes, sweeps = by_kind(reports)
    found = [
        _table("Runs", [column for run in runs for column in _run_columns(run)]),
        *map(_failure_table, runs),
        _table("Capacity", [(report.name, _capacity_cells(report)) for report in capacities]),
        *map(_trial_table, capacities),
        _table("Long prompts", [(report.name, _probe_cells(report)) for report in probes]),
        *map(sweep_table, sweeps),
        *(_failure_table(point.run) for sweep in sweeps for point in sweep.points),
    ]
    return [table for table in found if table.rows]


def _table(title: str, columns: Sequence[tuple[str, _Cells]]) -> Table:
    """Args: columns: header and cells of each, all with the same rows."""
    header = ["", *(name for name, _ in columns)]
    row_names = columns[0][1] if columns else {}
    return Table(title, header, [[row, *(cells[row] for _, cells in columns)] for row in row_names])


def _run_columns(report: RunReport) -> list[tuple[str, _Cells]]:
    default, by_class = report.slos.default, report.slos.by_class
    columns = [(report.name, _run_cells(report.summary, [default, *by_class.values()]))]
    for name, summary in report.by_class.items():
        columns.append((f"{report.name}: {name}", _run_cells(summary, [report.slos.of(name)])))
    return columns


def _run_cells(summary: Summary, slos: Sequence[SloClass]) -> _Cells:
    """Args: slos: of the requests; where they promise nothing, nothing can be attained."""
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
        **_latency_cells("TTFT", summary.ttft_s),
        **_latency_cells("ITL", summary.itl_s),
        **_latency_cells("TPOT", summary.tpot_s),
        **_latency_cells("E2E", summary.e2e_s),
        "SLO attained": f"{summary.attainment:.1%}" if are_promised else NOTHING,
        "goodput, requests/s": f"{summary.goodput_per_s:.2f}" if are_promised else NOTHING,
    }


def _failure_table(report: RunReport) -> Table:
    errors = Counter(r.error for r in report.records if r.error is not None)
    rows = [[error, str(count)] for error, count in errors.most_common()]
    return Table(f"Failures: {report.name}", ["", "requests"], rows)


def _latency_cells(name: str, latency_s: Distribution | None) -> _Cells:
    values_s = (latency_s.p50, latency_s.p99, latency_s.max) if latency_s else (None, None, None)
    texts = map(duration, values_s)
    return {f"{name} {which}": text for which, text in zip(_SHOWN, texts, strict=True)}


def _trial_table(report: CapacityReport) -> Table:
    """The trials of one search, by rate."""
    trials = sorted(report.capacity.trials, key=lambda trial: trial.rate_per_s)
    rows = [
        [
            f"{trial.rate_per_s:.3g}/s",
            duration(trial.p99_itl_s),
            duration(trial.median_delay_s),
            f"{trial.num_failed} of {trial.num_requests}",
            "yes" if trial.is_sustained else "no",
        ]
        for trial in trials
    ]
    header = ["rate", "ITL p99", "median delay", "failed", "sustained"]
    return Table(f"Trials: {report.name}", header, rows)


def _capacity_cells(report: CapacityReport) -> _Cells:
    capacity = report.capacity
    return {
        f"ITL {percentile(capacity.rule.itl_slo_quantile)} at most": duration(
            capacity.rule.itl_slo_s
        ),
        "median delay at most": duration(capacity.rule.max_delay_s),
        "capacity": f"{capacity.rate_per_s:.3g} requests/s",
        "trials": str(len(capacity.trials)),
    }


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
