"""`legato explain` without a request: the requests that waited longest, and why."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from legato.cli.table import Table, duration
from legato.observe.traces.attribution import Cause, Span, Waits, total_parts
from legato.observe.traces.drafted import drafted_by_all

Wait = Literal["first", "longest"]

_NAMES: dict[Cause, str] = {
    "http_in": "HTTP in",
    "inbox": "the step before",
    "grammar": "grammar",
    "queue": "queue",
    "memory": "memory",
    "transfer": "transfer",
    "preemption": "preemption",
    "own_prefill": "own prompt",
    "others_prefill": "others' prompts",
    "own_decode": "own tokens",
    "others_decode": "other streams' tokens",
    "own_drafts": "own drafts",
    "others_drafts": "drafts of others",
    "yielded": "passed over",
    "between_steps": "between steps",
    "unrecorded": "unrecorded",
    "http_out": "HTTP out",
}
"""The names in docs/guides/trace.md."""

_ALIKE = 0.05
"""Waits, and their main causes' shares, count as alike up to this relative difference."""


def tables(waits: Sequence[Waits], wait: Wait, most: int) -> list[Table]:
    """Return tables of the causes of all waits, and of the longest waits.

    Args:
        wait: sorts the requests, by the first token or by the longest gap.
        most: rows to show; requests that waited alike share a row.
    """
    return [_sums(waits), _longest(waits, wait, most)]


def _sums(waits: Sequence[Waits]) -> Table:
    totals = [total_parts(w.first for w in waits), total_parts(w.longest for w in waits)]
    causes = sorted(_NAMES, key=lambda cause: -totals[0][cause])
    rows = [
        [_NAMES[cause], *(_share(total[cause], total.total()) for total in totals)]
        for cause in causes
        if any(total[cause] for total in totals)
    ]
    rows.append(["all, in seconds", *(f"{total.total():.2f}" for total in totals)])
    num_requests = len({request.name for request in waits})
    choices = f" ({len(waits)} choices)" if len(waits) > num_requests else ""
    title = f"Where the waits of {num_requests} requests{choices} went"
    return Table(title, ["", "to first tokens", "each one's longest gap"], rows)


def _longest(waits: Sequence[Waits], wait: Wait, most: int) -> Table:
    found: list[tuple[Span, Waits]] = []
    for request in waits:
        span = getattr(request, wait)
        if span is not None:
            found.append((span, request))
    found.sort(key=lambda pair: -pair[0].seconds)
    groups = _alike((request for _, request in found), most)
    header = [
        "request",
        "alike",
        "class",
        "prompt",
        "tokens",
        "drafts",
        "TTFT",
        "of it",
        "longest gap",
        "of it",
    ]
    name = "time to first token" if wait == "first" else "gap"
    return Table(f"The longest, by {name}", header, [_row(group) for group in groups])


def _alike(requests: Iterable[Waits], most: int) -> list[list[Waits]]:
    """Group requests that waited like the first of their group. Args: most: groups."""
    groups: list[list[Waits]] = []
    for request in requests:
        group = next((group for group in groups if _are_alike(group[0], request)), None)
        if group is not None:
            group.append(request)
        elif len(groups) < most:
            groups.append([request])
    return groups


def _are_alike(one: Waits, other: Waits) -> bool:
    spans = ((one.first, other.first), (one.longest, other.longest))
    return one.slo_class == other.slo_class and all(_are_close(*pair) for pair in spans)


def _are_close(one: Span | None, other: Span | None) -> bool:
    if one is None or other is None or not (one.parts and other.parts):
        return one == other
    (cause, share), (other_cause, other_share) = _main_cause(one), _main_cause(other)
    return (
        cause == other_cause
        and abs(share - other_share) <= _ALIKE
        and math.isclose(one.seconds, other.seconds, rel_tol=_ALIKE)
    )


def _row(group: Sequence[Waits]) -> list[str]:
    request = group[0]
    choice = f" --choice {request.choice}" if request.choice else ""
    return [
        request.name + choice,
        str(len(group)) if len(group) > 1 else "",
        request.slo_class or "",
        _range(r.num_prompt_tokens for r in group),
        _range(r.num_output_tokens for r in group),
        _drafts(group),
        *_wait_cells(request.first),
        *_wait_cells(request.longest),
    ]


def _range(counts: Iterable[int | None]) -> str:
    known = {count for count in counts if count is not None}
    return "–".join(map(str, dict.fromkeys((min(known), max(known))))) if known else ""


def _drafts(group: Sequence[Waits]) -> str:
    told = drafted_by_all(request.drafted for request in group)
    if not told.num_drafts:
        return ""
    right = f"{told.num_accepted.total()} of {told.num_drafts.total()} right"
    return f"{right}, {told.tokens_a_step:.2f} tokens a step"


def _wait_cells(span: Span | None) -> list[str]:
    if span is None or not span.parts:
        return ["", ""]
    cause, share = _main_cause(span)
    return [duration(span.seconds), f"{share:.0%} {_NAMES[cause]}"]


def _main_cause(span: Span) -> tuple[Cause, float]:
    """Return the main cause of a wait that took time, and its share."""
    cause = max(span.parts, key=span.parts.__getitem__)
    return cause, span.parts[cause] / span.seconds


def _share(seconds: float, of_s: float) -> str:
    return f"{seconds / of_s:.0%}" if of_s else ""
