"""What came of each routing: a table, bars and a page for each traffic."""

from collections.abc import Sequence

import msgspec
import numpy as np
from matplotlib.figure import Figure

from legato.cli.table import Table, duration
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.summary import Slos, summarize

_BARS = {
    "attainment": "SLO attained, %",
    "hit_rate": "prompt tokens from the cache, %",
    "ttft_p50_s": "TTFT p50, s",
    "ttft_p99_s": "TTFT p99, s",
}
"""Key the figure, value what it is called in the picture."""
_WIDTH_INCHES, _ROW_INCHES = 7.5, 2.2
_GROUP, _LABEL_MARGIN = 0.8, 0.2


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of the requests that came after the warm-up, over all seeds; shares are of them all.

    Attributes:
        hit_rate: share of the finished requests' prompt tokens.
        attainments: of each seed.
    """

    num_requests: int
    attainment: float
    attainments: list[float]
    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    refused: int
    failed: int


def figures(records_of_seeds: Sequence[Sequence[RequestRecord]], slos: Slos) -> Figures:
    """Args: records_of_seeds: without those of the warm-up; one finished at least."""
    together = [record for records in records_of_seeds for record in records]
    summary = summarize(together, slos)
    assert summary.ttft_s is not None
    assert summary.itl_s is not None
    counts = summary.num_requests
    return Figures(
        num_requests=len(together),
        attainment=summary.attainment,
        attainments=[summarize(records, slos).attainment for records in records_of_seeds],
        hit_rate=summary.cached_share or 0.0,
        ttft_p50_s=summary.ttft_s.p50,
        ttft_p99_s=summary.ttft_s.p99,
        itl_p50_s=summary.itl_s.p50,
        itl_p99_s=summary.itl_s.p99,
        refused=counts.get("refused", 0),
        failed=counts.get("error", 0),
    )


def table(title: str, found: dict[str, Figures]) -> Table:
    """A row for each routing. Args: found: key the routing."""
    header = ["routing", "requests", "attained", "by seed", "from the cache", "TTFT p50", "p99",
              "ITL p50", "p99", "refused", "failed"]  # fmt: skip
    return Table(title, header, [_row(routing, one) for routing, one in found.items()])


def _row(routing: str, one: Figures) -> list[str]:
    by_seed = f"{min(one.attainments):.1%} to {max(one.attainments):.1%}"
    return [
        routing,
        str(one.num_requests),
        f"{one.attainment:.1%}",
        by_seed if len(one.attainments) > 1 else "",
        f"{one.hit_rate:.1%}",
        *map(duration, (one.ttft_p50_s, one.ttft_p99_s, one.itl_p50_s, one.itl_p99_s)),
        str(one.refused),
        str(one.failed),
    ]


def plot(found: dict[str, dict[str, Figures]]) -> Figure:
    """Bars: a panel for each figure, with a group for each traffic and a bar for each routing.

    Args:
        found: key the traffic, and then the routing.
    """
    routings = list(next(iter(found.values())))
    figure = Figure(figsize=(_WIDTH_INCHES, _ROW_INCHES * len(found)), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True).ravel()
    height = _GROUP / len(routings)
    for axes, (name, label) in zip(panels, _BARS.items(), strict=True):
        scale = 100.0 if label.endswith("%") else 1.0
        for index, routing in enumerate(routings):
            values = [scale * getattr(of[routing], name) for of in found.values()]
            places = np.arange(len(found)) + (index + 0.5) * height - _GROUP / 2
            bars = axes.barh(places, values, 0.9 * height, color=f"C{index}", label=routing)
            axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
        axes.set_yticks(range(len(found)), list(found), fontsize=8)
        axes.tick_params(labelsize=7)
        axes.margins(x=_LABEL_MARGIN)
        axes.set_title(label, loc="left", fontsize=8)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncol=len(routings), loc="outside upper center")
    return figure
