"""What must hold after a soak, and what it looked like."""

from collections import Counter

import msgspec
from matplotlib.figure import Figure

from benchmarks.soak.clients import BAD_REQUEST, ENGINE_DEAD, End
from benchmarks.soak.memory import growth, lives
from benchmarks.soak.run import KINDS, Sent, Soak
from legato.cli.table import Table

_MIB = 2**20


class Check(msgspec.Struct, frozen=True):
    """One condition; `found` is what it was told from."""

    name: str
    holds: bool
    found: str


def checks(soak: Soak, max_growth: float) -> list[Check]:
    """All that must hold.

    Args:
        max_growth: of a process's resident memory after its warm-up, as a fraction.
    """
    assert soak.counts is not None
    counts = soak.counts
    return [
        _ends_once(soak),
        _fails_for_a_reason(soak),
        _same_outputs(soak),
        _server_counts(soak),
        Check(
            "no block is leaked",
            not counts.num_unfinished and not counts.kv_usage,
            f"{counts.num_unfinished:g} unfinished, {counts.kv_usage:.2%} of the cache in use",
        ),
        Check(
            "the engine was started again, and /health said so",
            counts.num_restarts == 1 and soak.health == [200, 503, 200],
            f"{counts.num_restarts:g} restarts, /health {soak.health}",
        ),
        *_memory(soak, max_growth),
    ]


def _ends_once(soak: Soak) -> Check:
    lost = [sent.outcome.detail for sent in soak.sent if sent.outcome and _is(sent, End.LOST)]
    ends = soak.ends
    missing = [end.value for end in End if end is not End.LOST and not ends[end]]
    found = [f"{num} {end}" for end, num in sorted(ends.items())]
    found += [f"none {name}" for name in missing] + lost[:3]
    holds = ends.total() == len(soak.sent) and not lost and not missing
    return Check(
        "every request ends as finished, aborted, refused or failed", holds, "; ".join(found)
    )


def _fails_for_a_reason(soak: Soak) -> Check:
    """Malformed ones by a 400, the others by the death of the engine only."""
    details = Counter(
        (sent.kind == "malformed", sent.outcome.detail)
        for sent in soak.sent
        if sent.outcome and _is(sent, End.FAILED)
    )
    holds = set(details) <= {(True, BAD_REQUEST), (False, ENGINE_DEAD)}
    found = ", ".join(f"{num} {detail}" for (_, detail), num in details.items())
    return Check("only malformed requests and those of the killed engine fail", holds, found)


def _same_outputs(soak: Soak) -> Check:
    finished = [
        (soak.cases[sent.case], sent.outcome.text)
        for sent in soak.sent
        if sent.outcome and _is(sent, End.FINISHED)
    ]
    others = [(case, text) for case, text in finished if text != case.text]
    num_ties = sum(case.is_near_tie(text) for case, text in others)
    found = f"{len(finished)} outputs, {len(others)} differ, {num_ties} of them from a near tie on"
    return Check("outputs equal an undisturbed run's", num_ties == len(others), found)


def _server_counts(soak: Soak) -> Check:
    """Of a client that left early, or sent something malformed, the server may know nothing."""
    assert soak.counts is not None
    most = len(soak.cases) + soak.max_waiting + len(soak.sent)
    uncertain = sum(sent.kind == "malformed" or _is(sent, End.ABORTED) for sent in soak.sent)
    num_ended = soak.counts.num_ended
    found = f"{num_ended:g}, where {most - uncertain} to {most} are right"
    return Check("the server counts each end once", most - uncertain <= num_ended <= most, found)


def _memory(soak: Soak, max_growth: float) -> list[Check]:
    found = []
    for pid, life in lives(soak.memory).items():
        grown = growth(life)
        size = f"{grown:+.1%}, {life[-1].num_bytes / _MIB:.0f} MiB at the end"
        name = f"memory of the {life[0].process} ({pid}) grows by at most {max_growth:.0%}"
        found.append(Check(name, grown <= max_growth, size))
    return found


def _is(sent: Sent, end: End) -> bool:
    return sent.outcome is not None and sent.outcome.end is end


def ends_table(soak: Soak) -> Table:
    """Counts of requests by kind and end."""
    counts = Counter((sent.kind, sent.outcome.end) for sent in soak.sent if sent.outcome)
    rows = [[kind, *(str(counts[kind, end]) for end in End)] for kind in KINDS]
    return Table("Ends", ["requests", *(end.value for end in End)], rows)


def checks_table(found: list[Check]) -> Table:
    rows = [[check.name, "ok" if check.holds else "BROKEN", check.found] for check in found]
    return Table("What must hold", ["condition", "", "found"], rows)


def plot_memory(soak: Soak) -> Figure:
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for pid, life in lives(soak.memory).items():
        sizes = [one.num_bytes / _MIB for one in life]
        label = f"{life[0].process} ({pid}), {growth(life):+.1%} after its warm-up"
        axes.plot([one.at_s / 60.0 for one in life], sizes, label=label)
    if soak.killed_s is not None:
        axes.axvline(soak.killed_s / 60.0, color="0.4", linestyle=":", label="SIGKILL")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes")
    axes.set_ylabel("resident memory, MiB")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    return figure


def figures(soak: Soak, found: list[Check]) -> dict[str, object]:
    """Everything, to look at again."""
    return {
        "rate_per_s": soak.rate_per_s,
        "killed_s": soak.killed_s,
        "health": soak.health,
        "checks": found,
        "requests": soak.sent,
        "memory": soak.memory,
    }
