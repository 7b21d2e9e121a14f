"""Compares the demo's runs in a table and a picture."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from legato.cli.table import Table, duration
from legato.observe.distribution import distribution
from legato_lab.demo.stage import DemoRun

_NOTICEABLE = 1.05
_IN_TIME, _LATE, _SHADE = "#1f5fa8", "#c0392b", "#f2d7a0"


def comparison(runs: Sequence[DemoRun]) -> Table:
    """Return a table with a row for each policy."""
    title = (
        "ITL of the streams, alone and beside the prompt, and the prompt's TTFT "
        f"(promised: {duration(runs[0].traffic.itl_slo_s)})"
    )
    header = ["policy", "alone", "median", "longest", "late", "TTFT"]
    return Table(title, header, [_row(run) for run in runs])


def verdict(runs: Sequence[DemoRun]) -> str:
    """Describe what the last run's promise gained over the first run, and its cost."""
    whole, promised = runs[0].result(), runs[-1].result()
    stopped_s, waited_s = (float(run.itl_s(during=True).max()) for run in (whole, promised))
    ratio = promised.ttft_s / whole.ttft_s
    price = (
        f"{ratio:.1f} times as long: that is the promise's price"
        if ratio > _NOTICEABLE
        else "no later: the promise cost nothing"
    )
    return (
        f"Computed whole, the prompt stopped the streams for {duration(stopped_s)}, and had its "
        f"first token after {duration(whole.ttft_s)}. Under a promise of "
        f"{duration(runs[-1].traffic.itl_slo_s)}, no stream waited longer than "
        f"{duration(waited_s)}, and the first token came after {duration(promised.ttft_s)}, "
        f"{price}."
    )


def _row(run: DemoRun) -> list[str]:
    result = run.result()
    during_s = result.itl_s(during=True)
    alone, beside = distribution(result.itl_s(during=False)), distribution(during_s)
    assert beside is not None, "every stream has a token after the long prompt's first one"
    return [
        run.name,
        duration(alone.p50 if alone else None),
        *map(duration, (beside.p50, beside.max)),
        f"{np.mean(during_s > run.traffic.itl_slo_s):.0%}",
        duration(result.ttft_s),
    ]


def plot(runs: Sequence[DemoRun], path: Path, title: str) -> None:
    """Plot a panel for each policy, with a dot for each token at its stream's waiting time.

    Tokens that came together are one dot.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not know the format of the file's name.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.25 * len(runs) + 1.1), layout="constrained")
    rows = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, run in zip(rows, runs, strict=True):
        result, slo_s = run.result(), run.traffic.itl_slo_s
        axes.axvspan(0.0, result.ttft_s, color=_SHADE, alpha=0.6, linewidth=0)
        axes.axhline(slo_s, color="0.4", linestyle="--", linewidth=0.8)
        gaps = np.array(
            [(at, at - last) for times in result.token_times_s for last, at in pairwise(times)]
        )
        is_late = gaps[:, 1] > slo_s
        for chosen, color in ((~is_late, _IN_TIME), (is_late, _LATE)):
            axes.plot(*gaps[chosen].T, ".", markersize=3.5, color=color)
        longest_s = result.itl_s(during=True).max()
        axes.set_title(
            f"{run.name}: longest wait {duration(longest_s)}, "
            f"the prompt's first token after {duration(result.ttft_s)}",
            loc="left",
            fontsize=9,
        )
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: duration(value))
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", alpha=0.3)
    rows[-1].set_xlabel(
        "seconds since the long prompt came (shaded: until its first token; dashed: promised)",
        fontsize=9,
    )
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
