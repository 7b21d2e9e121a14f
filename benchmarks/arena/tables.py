"""The arena's figures as tables; with another version's beside them, "before → after"."""

from collections.abc import Callable, Sequence

from benchmarks.arena.case import Case
from benchmarks.arena.outcome import Outcome
from benchmarks.arena.slowdown import Distribution, Slowdown
from legato.cli.table import NOTHING, Table

BOUND_S = 10.0
"""Bound on the time without an advance, and on a light tenant's wait for a first token."""

Row = tuple[Case, Outcome | None, Outcome]
"""A case, and what came of it with another version, if there is one, and with this one."""


def case_table(rows: Sequence[Row]) -> Table:
    """Return the issue's cases, each with the figures that it quotes."""
    has_before = any(before is not None for _, before, _ in rows)
    header = ["case", "issue 58", *(["before"] if has_before else []), "now"]
    return Table(
        "Cases of the issue",
        header,
        [
            [case.name, case.issue, *([before.quoted(case)] if before else []), now.quoted(case)]
            for case, before, now in rows
        ],
    )


def flood_table(rows: Sequence[Row]) -> Table:
    """Return the floods, a row each, or two with another version."""
    told = []
    for case, before, now in rows:
        if before is not None:
            told.append([f"{case.name} before", *(column(before) for column in _COLUMNS.values())])
        name = case.name if before is None else "now"
        told.append([name, *(column(now) for column in _COLUMNS.values())])
    return Table("Floods: SHAPE/FLOOD/TENANTS/PROMISE", ["case", *_COLUMNS], told)


def summary_table(rows: Sequence[Row]) -> Table:
    """Return sums over the floods under each promise, and how many break an invariant."""
    promises = [*dict.fromkeys(case.name.rpartition("/")[2] for case, _, _ in rows)]
    told = []
    for promise in [*promises, "all"]:
        these = [row for row in rows if promise in ("all", row[0].name.rpartition("/")[2])]
        before = [(case, one) for case, one, _ in these if one is not None]
        if before:
            told.append([f"{promise} before", *_sums(before)])
        name = "now" if before else promise
        told.append([name, *_sums([(case, now) for case, _, now in these])])
    return Table("Floods by promise: cases beyond a bound, worst", _SUMS, told)


_SUMS = [
    "promise",
    "cases",
    f"light wait > {BOUND_S:g} s",
    f"still > {BOUND_S:g} s",
    f"denied > {BOUND_S:g} s",
    "kept",
    "late gaps",
    "refused",
    "Retry right",
    "output/s",
    "all/s",
    "errors",
]


def _sums(these: Sequence[tuple[Case, Outcome]]) -> list[str]:
    outcomes = [one for _, one in these]
    promised = sum(one.promised for one in outcomes)
    gaps = sum(one.gaps for one in outcomes)
    retries = sum(one.retries.num for one in outcomes)
    right = sum(one.retries.num * one.retries.within for one in outcomes)
    return [
        str(len(these)),
        _beyond([_light_s(one)[0] for one in outcomes]),
        _beyond([one.still_s for one in outcomes]),
        _beyond([one.denied_s for one in outcomes]),
        f"{sum(one.kept for one in outcomes) / promised:.1%}" if promised else NOTHING,
        f"{sum(one.late for one in outcomes) / gaps:.2%}" if gaps else NOTHING,
        str(sum(one.refused for one in outcomes)),
        f"{right / retries:.0%}" if retries else NOTHING,
        f"{sum(one.output_per_s for one in outcomes) / len(outcomes):.0f}",
        f"{sum(one.tokens_per_s for one in outcomes) / len(outcomes):.0f}",
        str(sum(bool(one.error) for one in outcomes)),
    ]


def _beyond(seconds: Sequence[float]) -> str:
    return f"{sum(one > BOUND_S for one in seconds)}, {max(seconds):.1f} s"


def slowdown_tables(
    now: Sequence[Slowdown | None], before: Sequence[Slowdown | None] | None
) -> list[Table]:
    """Return a table for each trace, shape and load."""
    places: dict[tuple[str, str, float], list[tuple[Slowdown, Slowdown | None]]] = {}
    old = [None] * len(now) if before is None else before
    for one, other in zip(now, old, strict=True):
        if one is not None:
            places.setdefault((one.trace, one.shape, one.load), []).append((one, other))
    tables = []
    for (trace, shape, load), these in places.items():
        by_length = these[0][0].by_length
        rows = []
        for one, other in these:
            if other is not None:
                rows.append(_slowdown_row(f"{other.order} before", other))
            rows.append(_slowdown_row(one.order if other is None else "now", one))
        title = f"Slowdown, mean / P50 / P99, {trace} on {shape} at load {load:g}"
        title += f", {these[0][0].rate_per_s:.2f} requests/s"
        header = [f"{name} tokens ({part.num})" for name, part in by_length.items()]
        tables.append(Table(title, ["order", "longest", "all", *header], rows))
    return tables


def _slowdown_row(name: str, one: Slowdown) -> list[str]:
    parts = [one.all, *one.by_length.values()]
    return [name, f"{one.all.worst_s:.1f} s", *map(_slowed, parts)]


def _slowed(one: Distribution) -> str:
    return f"{one.mean:.1f} / {one.p50:.1f} / {one.p99:.0f}"


def _light_s(one: Outcome) -> tuple[float, str]:
    """Return the longest wait of a tenant that does not flood, and its source."""
    waits = [(served.longest_s, name) for name, served in one.by_source.items() if name[0] == "z"]
    return max(waits, default=(0.0, ""))


def _who(seconds: float, name: str) -> str:
    return f"{seconds:.1f} {name}"


def _shares(one: Outcome) -> str:
    if not one.shares:
        return NOTHING
    least, most = min(one.shares.values()), max(one.shares.values())
    return f"{least:.2f} to {most:.2f}"


def _kept(one: Outcome) -> str:
    late = f", {one.late / one.gaps:.1%} late" if one.gaps else ""
    return f"{one.kept} of {one.promised}{late}" if one.promised else NOTHING


def _retries(one: Outcome) -> str:
    retries = one.retries
    if not retries.num:
        return NOTHING
    return f"{retries.stated_s:.0f} / {retries.true_s:.0f}, {retries.within:.0%} right"


_COLUMNS: dict[str, Callable[[Outcome], str]] = {
    "light waits, s": lambda one: _who(*_light_s(one)),
    "longest wait, s": lambda one: ">" * one.is_open + _who(one.first_s, one.first_who),
    "still, s": lambda one: _who(one.still_s, one.still_who),
    "denied, s": lambda one: _who(one.denied_s, one.denied_who),
    "service / share": _shares,
    "batch": lambda one: f"{one.best_effort:.0%}",
    "kept, gaps": _kept,
    "preempted, refused": lambda one: f"{one.preempted}, {one.refused}",
    "Retry / true, s": _retries,
    "tokens/s": lambda one: f"{one.output_per_s:.0f}, {one.tokens_per_s:.0f} {one.error}".rstrip(),
}
"""Key the heading; the two rates are of outputs and of all tokens."""
