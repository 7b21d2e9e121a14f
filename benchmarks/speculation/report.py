"""What came of the rounds: a table, and a picture."""

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.speculation.client import Figures
from benchmarks.speculation.rounds import Measured, by_case, same_answers, speed_ups
from legato.cli.table import Table, duration

_WIDTH_INCHES, _ROW_INCHES, _GROUP = 10, 2.6, 0.8


def table(rounds: Sequence[Measured]) -> Table:
    """A row for each side of each case; figures are medians over its rounds."""
    first = next(iter(rounds[0].sides))
    header = ["", "streams", "side", "tokens/s", f"of {first}'s", "by round", "TPOT", "slowest",
              "ITL p50", "p99", "tokens a delivery", "drafts accepted", "same answers"]  # fmt: skip
    rows = [
        [workload if not index else "", str(count) if not index else "", *_cells(own, side)]
        for (workload, count), own in by_case(rounds).items()
        for index, side in enumerate(own[0].sides)
    ]
    return Table(f"medians of rounds, ratios to {first}'s of the same round", header, rows)


def _cells(rounds: Sequence[Measured], side: str) -> list[str]:
    ratios = speed_ups(rounds)[side]
    figures = [one.sides[side] for one in rounds]
    per_delivery = sum(f.num_tokens for f in figures) / sum(f.num_deliveries for f in figures)
    return [
        side,
        f"{_median(figures, lambda f: f.tokens_per_s):.1f}",
        f"{median(ratios):.2f}x",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        duration(_median(figures, lambda f: f.tpot_s)),
        _slowest(rounds, side),
        duration(_median(figures, lambda f: f.itl_p50_s)),
        duration(_median(figures, lambda f: f.itl_p99_s)),
        f"{per_delivery:.2f}",
        _acceptance(figures),
        f"{same_answers(rounds, side):.0%}",
    ]


def _slowest(rounds: Sequence[Measured], side: str) -> str:
    """Return the slowest stream's time per token, and its worst ratio to the first side's."""
    seconds = [one.sides[side].slowest_tpot_s for one in rounds]
    first_s = [next(iter(one.sides.values())).slowest_tpot_s for one in rounds]
    ratio = max(own / first for own, first in zip(seconds, first_s, strict=True))
    return f"{duration(median(seconds))}, {ratio:.2f}x at most"


def _acceptance(figures: Sequence[Figures]) -> str:
    """Nothing where the server does not tell, or drafted nothing."""
    num_drafted = sum(f.num_drafted or 0 for f in figures)
    num_accepted = sum(f.num_accepted or 0 for f in figures)
    return f"{num_accepted:,} of {num_drafted:,}" if num_drafted else ""


def _median(figures: Sequence[Figures], of: Callable[[Figures], float]) -> float:
    return median(map(of, figures))


def plot(rounds: Sequence[Measured]) -> Figure:
    """A column for each workload, with bars for each number of streams and side."""
    cases = by_case(rounds)
    workloads = list(dict.fromkeys(workload for workload, _ in cases))
    sides = list(rounds[0].sides)
    figure = Figure(figsize=(_WIDTH_INCHES, 2 * _ROW_INCHES), layout="constrained")
    panels = figure.subplots(2, len(workloads), sharey="row", squeeze=False)
    for column, workload in zip(panels.T, workloads, strict=True):
        own = {count: found for (name, count), found in cases.items() if name == workload}
        column[0].set_title(workload, loc="left", fontsize=9)
        column[0].axhline(1.0, color="0.5", linewidth=0.8)
        _bars(column[0], own, sides, lambda found, side: median(speed_ups(found)[side]))
        _bars(column[1], own, sides, _itl_p99_ms)
        column[1].set_yscale("log")
        column[1].yaxis.set_major_formatter("{x:g}")
        column[1].yaxis.set_minor_formatter(NullFormatter())
        column[1].set_xlabel("streams", fontsize=8)
    panels[0][0].set_ylabel(f"tokens a second, of {sides[0]}'s", fontsize=8)
    panels[1][0].set_ylabel("ITL p99, ms", fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncol=len(sides), loc="outside upper center")
    return figure


def _itl_p99_ms(rounds: Sequence[Measured], side: str) -> float:
    return 1e3 * median(one.sides[side].itl_p99_s for one in rounds)


def _bars(
    axes: Axes,
    cases: dict[int, list[Measured]],
    sides: Sequence[str],
    value: Callable[[Sequence[Measured], str], float],
) -> None:
    """Args: cases: key the number of streams."""
    width = _GROUP / len(sides)
    for index, side in enumerate(sides):
        places = np.arange(len(cases)) + (index + 0.5) * width - _GROUP / 2
        values = [value(rounds, side) for rounds in cases.values()]
        bars = axes.bar(places, values, 0.9 * width, color=f"C{index}", label=side)
        axes.bar_label(bars, fmt="%.3g", fontsize=6, padding=1)
    axes.set_xticks(range(len(cases)), [str(count) for count in cases])
    axes.tick_params(labelsize=7)
    axes.margins(y=0.12)
