"""How all plots look, and how they get into a page."""

import io

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from legato.bench.report.tables import duration

_WIDTH_INCHES = 7.0
_ROW_INCHES = 2.6
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def new_figure(
    title: str, *, num_rows: int = 1, row_inches: float = _ROW_INCHES, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure with rows that share their x axis."""
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
    """Enough of them for a part of a decade."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_formatter(NullFormatter())


def durations(axis: Axis) -> None:
    """Label an axis of seconds."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))


def svg(figure: Figure) -> str:
    """The figure as an element that can stand within HTML."""
    axes = figure.axes[0]
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
    written = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(written, format="svg", dpi=150, metadata=_NO_METADATA)
    svg = written.getvalue()
    return svg[svg.index("<svg") :]
