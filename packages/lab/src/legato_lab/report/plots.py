"""Plots of reports, in SVG for a page; each report has its own colour.

Also the common style of all plots.
"""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from legato.cli.table import duration
from legato_lab.report.report_file import CapacityReport, ProbeReport, Report, RunReport, by_kind
from legato_lab.simulation.record import gaps_s

_WIDTH_INCHES = 7.0
_ROW_INCHES = 2.6
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_PROBE_ROW_INCHES = 1.3
_BAR_INCHES = 0.3
_LABEL_MARGIN = 0.12  # of the axis, for the figure beside the longest bar
_LINEAR_DELAY_S = 0.1  # below, a logarithm would stress what does not matter
_NUM_QUANTILES = 301
_NUM_TIME_BINS = 60
_MEDIAN = 50
_TAIL = 99


def plots(reports: Sequence[Report]) -> list[str]:
    """Return the SVG plots for each kind of report present."""
    runs, capacities, probes, _ = by_kind(reports)
    runs = [run for run in runs if run.records]
    figures = []
    if runs:
        figures += [_ttft_cdf(runs), _itl_cdf(runs), _itl_over_time(runs), _ttft_by_length(runs)]
    if capacities:
        figures += [_capacity_bars(capacities), _capacity_trials(capacities)]
    if probes:
        figures.append(_probe_streams(probes))
    return [svg(figure) for figure in figures]


def _ttft_cdf(runs: Sequence[RunReport]) -> Figure:
    return _cdf("Time to first token", [(run.name, _ttft_points(run)[1]) for run in runs])


def _itl_cdf(runs: Sequence[RunReport]) -> Figure:
    return _cdf("Inter-token latency", [(run.name, _itl_points(run)[1]) for run in runs])


def _itl_over_time(runs: Sequence[RunReport]) -> Figure:
    """Plot median and 99th percentile of the gaps that end within each sixtieth of a run."""
    figure, [axes] = new_figure("Inter-token latency over time: median, 99th percentile dashed")
    for index, run in enumerate(runs):
        bins = _time_bins(*_itl_points(run))
        if not bins:
            continue
        middles_s = [middle_s for middle_s, _ in bins]
        for percentile, style, label in ((_MEDIAN, "-", run.name), (_TAIL, "--", None)):
            values_s = [np.percentile(itl_s, percentile) for _, itl_s in bins]
            axes.plot(middles_s, values_s, style, color=f"C{index}", label=label, linewidth=1.2)
    axes.set_xlabel("seconds since the start")
    axes.set_yscale("log")
    log_durations(axes.yaxis)
    return figure


def _ttft_by_length(runs: Sequence[RunReport]) -> Figure:
    figure, [axes] = new_figure("Time to first token by length of the prompt")
    for run in runs:
        # Rasterized: thousands of vector points are too many for a page.
        axes.plot(*_ttft_points(run), ".", markersize=4, label=run.name, rasterized=True)
    axes.set_xlabel("tokens of the prompt")
    axes.set_yscale("log")
    log_durations(axes.yaxis)
    return figure


def _capacity_bars(reports: Sequence[CapacityReport]) -> Figure:
    """Plot a bar for each report, with its figure and its confidence interval."""
    figure, [axes] = new_figure(
        "Capacity in requests a second, with its 95 % interval",
        row_inches=_BAR_INCHES * (len(reports) + 1),
    )
    ends_per_s: list[float] = []
    for index, report in enumerate(reports):
        rate_per_s, interval = report.capacity.rate_per_s, report.capacity.interval_per_s
        axes.barh(index, rate_per_s, height=0.6, color=f"C{index}", alpha=0.8)
        if interval is not None:
            axes.plot(interval, (index, index), "k|-", linewidth=1.2, markersize=8)
        ends_per_s.append(interval[1] if interval else rate_per_s)
        axes.annotate(
            f"{rate_per_s:.3g}",
            (ends_per_s[-1], index),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(reports)), [report.name for report in reports])
    axes.invert_yaxis()
    axes.set_xlim(0.0, (1.0 + _LABEL_MARGIN) * max(ends_per_s) or 1.0)
    axes.grid(visible=False, axis="y")
    return figure


def _capacity_trials(reports: Sequence[CapacityReport]) -> Figure:
    """Plot P99 ITL and median scheduling delay by rate; lost trials are hollow."""
    figure, [itl_axes, delay_axes] = new_figure(
        "Trials by rate: sustained ones are filled; dotted: the limits", num_rows=2
    )
    for index, report in enumerate(reports):
        rule, trials = report.capacity.rule, report.capacity.trials
        for is_sustained in (True, False):
            chosen = [trial for trial in trials if trial.is_sustained == is_sustained]
            rates_per_s = [trial.rate_per_s for trial in chosen]
            look: dict[str, Any] = {
                "color": f"C{index}",
                "markerfacecolor": f"C{index}" if is_sustained else "none",
                "markersize": 5,
            }
            itl_s = _floats(trial.p99_itl_s for trial in chosen)
            label = report.name if is_sustained else None
            itl_axes.plot(rates_per_s, itl_s, "o", label=label, **look)
            delays_s = _floats(trial.median_delay_s for trial in chosen)
            # Near zero while a server keeps up; may be negative if the idle server was a little
            # slower.
            delay_axes.plot(rates_per_s, np.maximum(delays_s, 0.0), "o", **look)
        itl_axes.axhline(rule.itl_slo_s, color="0.4", linestyle=":")
        delay_axes.axhline(rule.max_delay_s, color="0.4", linestyle=":")
    itl_axes.set_ylabel("ITL p99", fontsize=8)
    delay_axes.set_ylabel("median delay", fontsize=8)
    delay_axes.set_xlabel("requests a second")
    delay_axes.set_xlim(left=0.0)
    itl_axes.set_yscale("log")
    log_durations(itl_axes.yaxis)
    delay_axes.set_yscale("symlog", linthresh=_LINEAR_DELAY_S)
    delay_axes.set_ylim(bottom=0.0)
    durations(delay_axes.yaxis)
    return figure


def _probe_streams(reports: Sequence[ProbeReport]) -> Figure:
    """Plot how long each stream waited for each of its tokens."""
    figure, rows = new_figure(
        "Each dot a token, or several at once: how long their stream had waited",
        num_rows=len(reports),
        row_inches=_PROBE_ROW_INCHES,
        share_y=True,
    )
    for axes, report in zip(rows, reports, strict=True):
        result = report.result
        axes.axvspan(0.0, result.ttft_s, color="#f2d7a0", alpha=0.6, linewidth=0)
        for times_s in result.token_times_s:
            axes.plot(times_s[1:], np.diff(times_s), ".", markersize=3, color="C0", rasterized=True)
        axes.set_title(report.name, loc="left", fontsize=9)
        axes.set_yscale("log")
        log_durations(axes.yaxis)
    rows[-1].set_xlabel("seconds since the long prompts were sent; shaded until their first tokens")
    return figure


def _cdf(title: str, curves: Sequence[tuple[str, np.ndarray]]) -> Figure:
    """Args: curves: name and values in seconds of each."""
    figure, [axes] = new_figure(f"{title}: fraction within")
    quantiles = np.linspace(0.0, 1.0, _NUM_QUANTILES)
    for index, (name, values_s) in enumerate(curves):
        if values_s.size:
            axes.plot(np.quantile(values_s, quantiles), quantiles, color=f"C{index}", label=name)
    axes.set_xscale("log")
    log_durations(axes.xaxis)
    return figure


def _ttft_points(run: RunReport) -> tuple[np.ndarray, np.ndarray]:
    """Return prompt length and TTFT of each request that finished: [N] and [N]."""
    points = [
        (record.request.num_prompt_tokens, record.ttft_s)
        for record in run.records
        if record.status == "ok"
    ]
    lengths, ttfts_s = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return lengths, ttfts_s


def _itl_points(run: RunReport) -> tuple[np.ndarray, np.ndarray]:
    """Return the end and the length of each gap of the requests that finished: [N] and [N]."""
    finished = [record for record in run.records if record.status == "ok"]
    times_s = np.array([at_s for record in finished for at_s in record.token_times_s[1:]])
    return times_s, gaps_s(finished)


def _time_bins(times_s: np.ndarray, values: np.ndarray) -> list[tuple[float, np.ndarray]]:
    """Return the middle of each time bin and the values in it, without empty bins."""
    edges_s = np.linspace(0.0, times_s.max(initial=0.0), _NUM_TIME_BINS + 1)
    bins = np.digitize(times_s, edges_s[1:-1])
    return [
        ((edges_s[index] + edges_s[index + 1]) / 2, values[bins == index])
        for index in np.unique(bins)
    ]


def _floats(values: Iterable[float | None]) -> np.ndarray:
    """Convert None to NaN, which leaves a hole in a curve."""
    return np.array(list(values), dtype=np.float64)


def new_figure(
    title: str, *, num_rows: int = 1, row_inches: float = _ROW_INCHES, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """Make a figure with rows that share their x axis."""
    size = (_WIDTH_INCHES, num_rows * row_inches + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=10)
    rows = figure.subplots(num_rows, sharex=True, sharey=share_y, squeeze=False)[:, 0].tolist()
    for axes in rows:
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    return figure, rows


def log_durations(axis: Axis) -> None:
    """Label a logarithmic axis of seconds."""
    log_ticks(axis)
    durations(axis)


def log_ticks(axis: Axis) -> None:
    """Set enough ticks for a part of a decade."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_formatter(NullFormatter())


def durations(axis: Axis) -> None:
    """Label an axis of seconds."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))


def svg(figure: Figure) -> str:
    """Return the figure as an element for an HTML page."""
    axes = figure.axes[0]
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
    written = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(written, format="svg", dpi=150, metadata=_NO_METADATA)
    svg = written.getvalue()
    return svg[svg.index("<svg") :]
