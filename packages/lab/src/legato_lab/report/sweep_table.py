"""A table of a sweep, with a row for each load."""

from legato.cli.table import NOTHING, Table, duration, percentile_of
from legato_lab.report.report_file import SweepPoint, SweepReport

_HEADER = [
    "requests",
    "failed",
    "duration",
    "requests/s",
    "output tokens/s",
    "TTFT p50",
    "TTFT p99",
    "ITL p50",
    "ITL p99",
    "E2E p50",
    "attained",
    "goodput, requests/s",
]


def sweep_table(report: SweepReport) -> Table:
    """Return a sweep's table. Throughput is under the full load; the rest is of all requests."""
    rows = [[report.load_kind.describe(point.load), *_cells(point)] for point in report.points]
    return Table(f"Sweep: {report.name}", [report.load_kind.value, *_HEADER], rows)


def _cells(point: SweepPoint) -> list[str]:
    summary, throughput = point.run.summary, point.throughput
    counts = summary.num_requests
    are_promised = point.run.slos.promise_anything
    return [
        str(sum(counts.values())),
        str(counts.get("refused", 0) + counts.get("error", 0)),
        duration(summary.duration_s),
        f"{throughput.requests_per_s:.3g}",
        f"{throughput.output_tokens_per_s:.0f}",
        percentile_of(summary.ttft_s, "p50"),
        percentile_of(summary.ttft_s, "p99"),
        percentile_of(summary.itl_s, "p50"),
        percentile_of(summary.itl_s, "p99"),
        percentile_of(summary.e2e_s, "p50"),
        f"{summary.attainment:.1%}" if are_promised else NOTHING,
        f"{summary.goodput_per_s:.3g}" if are_promised else NOTHING,
    ]
