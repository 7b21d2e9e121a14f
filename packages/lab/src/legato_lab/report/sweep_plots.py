"""Plots of sweeps: a curve of latency over throughput for each."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes

from legato.observe.distribution import Distribution
from legato_lab.report.plots import log_durations, new_figure, svg
from legato_lab.report.report_file import Report, SweepReport, by_kind
from legato_lab.simulation.summary import Summary

_LATENCIES: dict[str, Callable[[Summary], Distribution | None]] = {
    "ITL": lambda summary: summary.itl_s,
    "TTFT": lambda summary: summary.ttft_s,
}
_STYLES = {"p99": "o-", "p50": "o:"}


def sweep_plots(reports: Sequence[Report]) -> list[str]:
    """Return one SVG element for all sweeps, if there are any."""
    *_, sweeps = by_kind(reports)
    if not sweeps:
        return []
    figure, rows = new_figure(
        "Latency over throughput, labelled with the load: p99, p50 dotted", num_rows=len(_LATENCIES)
    )
    for axes, name in zip(rows, _LATENCIES, strict=True):
        for index, sweep in enumerate(sweeps):
            _draw(axes, sweep, name, f"C{index}")
        axes.set_ylabel(name)
        axes.set_yscale("log")
        log_durations(axes.yaxis)
        axes.set_xlim(left=0.0)
    rows[-1].set_xlabel("output tokens a second")
    return [svg(figure)]


def _draw(axes: Axes, sweep: SweepReport, latency: str, color: str) -> None:
    tokens_per_s = [point.throughput.output_tokens_per_s for point in sweep.points]
    found = [_LATENCIES[latency](point.run.summary) for point in sweep.points]
    for which, style in _STYLES.items():
        values_s = [np.nan if values is None else getattr(values, which) for values in found]
        label = sweep.name if which == "p99" else None
        axes.plot(tokens_per_s, values_s, style, color=color, label=label, markersize=3)
    for point, x, values in zip(sweep.points, tokens_per_s, found, strict=True):
        if values is not None:
            axes.annotate(
                f"{point.load:g}",
                (x, values.p99),
                xytext=(3, 3),
                textcoords="offset points",
                fontsize=7,
                color=color,
            )
