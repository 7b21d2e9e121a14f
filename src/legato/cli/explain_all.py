"""`legato explain` without a request: which waited longest, and for what."""

from collections.abc import Sequence
from typing import Literal

from legato.bench.report.tables import Table, duration
from legato.observe.traces.attribution import Cause, Span
from legato.observe.traces.waits import Waits, total_parts

Wait = Literal["first", "longest"]

_NAMES: dict[Cause, str] = {
    "http_in": "HTTP in",
    "inbox": "the step before",
    "queue": "queue",
    "memory": "memory",
    "preemption": "preemption",
    "own_prefill": "own prompt",
    "others_prefill": "others' prompts",
    "own_decode": "own tokens",
    "others_decode": "other streams' tokens",
    "yielded": "passed over",
    "between_steps": "between steps",
    "unrecorded": "unrecorded",
    "http_out": "HTTP out",
}
"""As docs/tracing.md calls them."""


def tables(waits: Sequence[Waits], wait: Wait, most: int) -> list[Table]:
    """Where all waits went, and the requests with the longest.

    Args:
        wait: for the first token, or the longest between two, by which the requests are sorted.
        most: requests to show.
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
    title = f"Where the waits of {len(waits)} requests went"
    return Table(title, ["", "to first tokens", "each one's longest gap"], rows)


def _longest(waits: Sequence[Waits], wait: Wait, most: int) -> Table:
    found: list[tuple[Span, Waits]] = []
    for request in waits:
        span = getattr(request, wait)
        if span is not None:
            found.append((span, request))
    found.sort(key=lambda pair: -pair[0].seconds)
    rows = [_row(request) for _, request in found[:most]]
    header = ["request", "class", "prompt", "tokens", "TTFT", "of it", "longest gap", "of it"]
    name = "time to first token" if wait == "first" else "gap"
    return Table(f"The longest, by {name}", header, rows)


def _row(request: Waits) -> list[str]:
    choice = f" --choice {request.choice}" if request.choice else ""
    return [
        request.name + choice,
        request.slo_class or "",
        "" if request.num_prompt_tokens is None else str(request.num_prompt_tokens),
        str(request.num_output_tokens),
        *_wait_cells(request.first),
        *_wait_cells(request.longest),
    ]


def _wait_cells(span: Span | None) -> list[str]:
    if span is None or not span.parts:
        return ["", ""]
    cause = max(span.parts, key=span.parts.__getitem__)
    return [duration(span.seconds), f"{_share(span.parts[cause], span.seconds)} {_NAMES[cause]}"]


def _share(seconds: float, of_s: float) -> str:
    return f"{seconds / of_s:.0%}" if of_s else ""
