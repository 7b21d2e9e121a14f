"""Plots of a tuning's results, in SVG for the page."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from legato_lab.report.plots import log_durations, new_figure, svg
from legato_lab.tune.report import TuneReport
from legato_lab.tune.score import Figures
from legato_lab.tune.search import Tried


def tune_plots(report: TuneReport) -> list[str]:
    """Return the Pareto front, and step time by budget if it was measured, as SVG elements."""
    figures = [_front(report)]
    if report.budgets:
        figures.append(_budgets(report))
    return [svg(figure) for figure in figures]


def _front(report: TuneReport) -> Figure:
    """Plot throughput against both tails."""
    figure, [itl, ttft] = new_figure(
        "Throughput against latency; dotted: the SLOs", num_rows=2, row_inches=2.8
    )
    best = report.finalists[0].candidate
    for axes, tail, limit_s in (
        (itl, lambda figures: figures.itl_p99_s, report.slo.itl_s),
        (ttft, lambda figures: figures.ttft_p99_s, report.slo.ttft_s),
    ):
        _scatter(axes, report.tried, tail, ".", "tried", color="0.7")
        _scatter(axes, report.front, tail, "o", "Pareto front", color="C0")
        chosen = [one for one in report.tried if one.candidate == best]
        _scatter(axes, chosen, tail, "*", "recommended", color="C3", markersize=12)
        if limit_s is not None:
            axes.axhline(limit_s, color="0.4", linestyle=":")
        axes.set_yscale("log")
        log_durations(axes.yaxis)
    itl.set_ylabel("ITL p99")
    ttft.set_ylabel("TTFT p99")
    ttft.set_xlabel("tokens a second when saturated")
    return figure


def _scatter(
    axes: Axes,
    tried: Sequence[Tried],
    tail: Callable[[Figures], float],
    marker: str,
    label: str,
    **style: object,
) -> None:
    rates = [one.figures.saturated_tokens_per_s or 0.0 for one in tried]
    tails_s = [tail(one.figures) for one in tried]
    axes.plot(rates, tails_s, marker, label=label, **style)  # type: ignore[arg-type]


def _budgets(report: TuneReport) -> Figure:
    figure, [axes] = new_figure("A step's time by token budget; dotted: the ITL SLO")
    budgets = [row.num_tokens for row in report.budgets]
    axes.plot(budgets, [row.measured_s for row in report.budgets], "o", label="idle, measured")
    axes.plot(budgets, [row.fitted_s for row in report.budgets], "-", label="idle, fitted")
    axes.plot(budgets, [row.served_s for row in report.budgets], "-", label="serving, fitted")
    axes.plot(budgets, [row.served_p99_s for row in report.budgets], "--", label="its p99")
    if report.slo.itl_s is not None:
        axes.axhline(report.slo.itl_s, color="0.4", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens a step")
    axes.set_yscale("log")
    log_durations(axes.yaxis)
    return figure
