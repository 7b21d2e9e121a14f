"""Whether promises were kept under overload: figures, tables and a plot."""

from collections.abc import Sequence

import msgspec
import numpy as np
from matplotlib.figure import Figure as Picture

from benchmarks.overload.busy import Span
from benchmarks.overload.client import Answer
from benchmarks.overload.traffic import KINDS, kind_of
from legato.cli.table import Table, duration
from legato.core.slo import SloClass
from legato.observe.distribution import distribution
from legato_lab.report.plots import log_durations, new_figure
from legato_lab.simulation.record import gaps_s
from legato_lab.simulation.summary import Slos

_ROWS = {
    "sent": "sent",
    "refused": "refused (429)",
    "lost": "lost",
    "admitted": "admitted",
    "left": "of these left by their clients",
    "share_kept": "within their promises",
    "share_ttft": "TTFT within the promise",
    "share_p99_gap": "P99 gap within",
    "share_every_gap": "every gap within",
    "goodput_per_s": "goodput, requests/s",
    "itl_p99_s": "ITL p99",
    "itl_max_s": "ITL max",
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "ttft_max_s": "TTFT max",
    "refusal_max_s": "longest wait for a refusal",
}
"""Key the figure, value its name for people."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one stretch of a run. Shares are of the requests that were admitted and whose clients
    stayed; those lost have kept nothing.

    Attributes:
        admitted: not refused.
        refused: by 429 with Retry-After; any other refusal counts as lost.
        lost: no answer, another status, or a stream without all its tokens and a finish reason.
        left: whose clients went away in the middle.
        share_ttft: whose first token came within the promise, as the client saw it.
        share_every_gap: whose gaps between tokens were all within the promise.
        share_p99_gap: of whose gaps at least 99 % were: all of them, where they are below 100.
        share_kept: both this and the first token: the requests within their promises.
        goodput_per_s: requests a second that were.
        itl_p99_s: P99 of all gaps, those of clients that left too.
        refusal_max_s: the longest wait for a refusal.
    """

    sent: int
    admitted: int
    refused: int
    lost: int
    left: int
    share_ttft: float
    share_every_gap: float
    share_p99_gap: float
    share_kept: float
    goodput_per_s: float
    itl_p99_s: float | None
    itl_max_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    ttft_max_s: float | None
    refusal_max_s: float | None


def figures(answers: Sequence[Answer], promise: SloClass, seconds: float) -> Figures:
    """Args: seconds: that the requests took to arrive."""
    admitted = [answer for answer in answers if answer.status != "refused"]
    stayed = [answer for answer in admitted if answer.status != "cancelled"]
    itl = distribution(gaps_s(admitted))
    ttft = distribution(np.array([a.ttft_s for a in admitted if a.ttft_s is not None]))
    refusals = [a for a in answers if a.status == "refused"]
    kept = _share(stayed, promise)
    return Figures(
        sent=len(answers),
        admitted=len(admitted),
        refused=len(refusals),
        lost=sum(answer.status == "error" for answer in answers),
        left=len(admitted) - len(stayed),
        share_ttft=_share(stayed, SloClass(ttft_s=promise.ttft_s)),
        share_every_gap=_mean([_keeps_every_gap(answer, promise) for answer in stayed]),
        share_p99_gap=_share(stayed, SloClass(itl_s=promise.itl_s)),
        share_kept=kept,
        goodput_per_s=kept * len(stayed) / seconds,
        itl_p99_s=itl.p99 if itl else None,
        itl_max_s=itl.max if itl else None,
        ttft_p50_s=ttft.p50 if ttft else None,
        ttft_p99_s=ttft.p99 if ttft else None,
        ttft_max_s=ttft.max if ttft else None,
        refusal_max_s=max((_wait_s(answer) for answer in refusals), default=None),
    )


def _share(answers: Sequence[Answer], promise: SloClass) -> float:
    slos = Slos(default=promise)
    return _mean([slos.are_met(answer) for answer in answers])


def _keeps_every_gap(answer: Answer, promise: SloClass) -> bool:
    return answer.status == "ok" and answer.itl_s.max(initial=0.0) <= promise.itl_s


def _mean(flags: Sequence[bool]) -> float:
    return float(np.mean(flags)) if flags else 1.0


def _wait_s(answer: Answer) -> float:
    assert answer.answered_s is not None
    return answer.answered_s - answer.request.arrival_s


def stretches(
    answers: Sequence[Answer], seconds: float, busy: Span | None
) -> dict[str, tuple[list[Answer], float]]:
    """The whole run and, where something else kept the machine busy for a part of it, both parts.

    Returns:
        Key its name; value the requests that arrived in it, and its seconds.
    """
    found = {"whole run": (list(answers), seconds)}
    if busy is not None and busy[1] - busy[0] < seconds:
        beside = [a for a in answers if busy[0] <= a.request.arrival_s < busy[1]]
        quiet = [a for a in answers if not busy[0] <= a.request.arrival_s < busy[1]]
        busy_s = busy[1] - busy[0]
        found |= {"quiet": (quiet, seconds - busy_s), "beside the loop": (beside, busy_s)}
    return found


def tables(found: dict[str, Figures], answers: Sequence[Answer]) -> list[Table]:
    """The figures, the waits by the kind of prompt, and what went wrong."""
    rows = [
        [label, *(_cell(name, getattr(figures, name)) for figures in found.values())]
        for name, label in _ROWS.items()
    ]
    header = ["sent", "refused", "lost", "TTFT p50", "TTFT p99", "longest wait"]
    errors = [[f"{a.request.arrival_s:.1f} s", f"{a.error}"] for a in answers if a.error]
    return [
        Table("Overload", ["", *found], rows),
        Table("By prompt", ["", *header], [_kind_row(kind, answers) for kind in KINDS]),
        Table("Lost", ["sent at", "error"], errors or [["", "none"]]),
    ]


def _cell(name: str, value: float | None) -> str:
    if name.startswith("share_"):
        return f"{value:.2%}"
    if name.endswith("_per_s"):
        return f"{value:.2f}"
    return duration(value) if name.endswith("_s") else str(value)


def _kind_row(kind: str, answers: Sequence[Answer]) -> list[str]:
    of_kind = [answer for answer in answers if kind_of(answer.request) == kind]
    ttft = distribution(np.array([a.ttft_s for a in of_kind if a.ttft_s is not None]))
    waits_s = (ttft.p50, ttft.p99, ttft.max) if ttft else (None, None, None)
    counts = [sum(a.status == status for a in of_kind) for status in ("refused", "error")]
    fewest, most = KINDS[kind]
    name = f"{kind}, {fewest:,} to {most:,} tokens"
    return [name, *map(str, (len(of_kind), *counts)), *map(duration, waits_s)]


def plot(answers: Sequence[Answer], promise: SloClass, busy: Span | None) -> Picture:
    """TTFT and each request's longest gap, over the time of its arrival."""
    figure, rows = new_figure("Requests by arrival; dotted: the promise", num_rows=2)
    ttft_axes, gap_axes = rows
    for color, kind in enumerate(KINDS):
        own = [a for a in answers if a.token_times_s and kind_of(a.request) == kind]
        at_s = [a.request.arrival_s for a in own]
        ttft_axes.plot(
            at_s, [a.ttft_s or 0.0 for a in own], ".", color=f"C{color}", label=kind, ms=4
        )
        gap_axes.plot(at_s, [a.itl_s.max(initial=0.0) for a in own], ".", color=f"C{color}", ms=4)
    refusals = [a for a in answers if a.status == "refused"]
    refused_s = [a.request.arrival_s for a in refusals]
    ttft_axes.plot(refused_s, list(map(_wait_s, refusals)), "x", color="0.5", ms=3, label="refused")
    for axes, promised_s in ((ttft_axes, promise.ttft_s), (gap_axes, promise.itl_s)):
        assert promised_s is not None
        if busy is not None:
            axes.axvspan(*busy, color="#f2d7a0", alpha=0.5, linewidth=0)
        axes.axhline(promised_s, color="0.3", linestyle=":")
        axes.set_yscale("log")
        log_durations(axes.yaxis)
    ttft_axes.set_ylabel("first token, or refusal")
    ttft_axes.legend(fontsize=7, ncol=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    gap_axes.set_ylabel("longest gap")
    gap_axes.set_xlabel(
        "seconds since the start" + ("; shaded: beside a busy loop" if busy else "")
    )
    return figure
