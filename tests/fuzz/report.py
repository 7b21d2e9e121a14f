"""What came of fuzzing, for people."""

from collections import Counter

from rich.console import Console
from rich.table import Table

from tests.fuzz.watched import MAX_DELAY_S, Case, Watched

_SHOWN_CHARS = 5000


def print_told(name: str, told: Counter[str], console: Console) -> None:
    table = Table("what", "came of it", "times", title=f"{name}: {told.total()} tries")
    for what, count in sorted(told.items()):
        table.add_row(*what.rsplit(maxsplit=1), str(count))
    console.print(table)


def print_watched(name: str, watched: Watched, console: Console) -> None:
    table = Table(
        "kind", "cases", "told", "longest case",
        "/health delayed", "seed", "stream delayed", "seed",
        title=f"{name}: {len(watched.cases)} cases; the machine's own longest delay was "
        f"{_ms(watched.machine_s)}, and is left out",
    )  # fmt: skip
    by_kind: dict[str, list[Case]] = {}
    for case in watched.cases:
        by_kind.setdefault(case.kind, []).append(case)
    for kind, cases in sorted(by_kind.items()):
        table.add_row(kind, str(len(cases)), *_row(cases))
    console.print(table)
    held = ", ".join(
        f"{module} {before >> 20} before, {watched.after[module] >> 20} after"
        for module, before in watched.before.items()
    )
    console.print(f"memory, MiB: {held}; all together at most {watched.peak_bytes >> 20}")


def failures_of(name: str, watched: Watched) -> list[str]:
    """All that must not have been."""
    failures = [f"{name}: {failure[:_SHOWN_CHARS]}" for failure in watched.failures]
    for case in watched.cases:
        title = f"{name}, seed {case.seed}, {case.kind}"
        if case.failure is not None:
            failures.append(f"{title}: {case.failure[:_SHOWN_CHARS]}")
        for what, delay_s in (("/health", case.health_s), ("the stream", case.stream_s)):
            if delay_s > MAX_DELAY_S:
                failures.append(f"{title}: {what} was delayed by {_ms(delay_s)}")
    return failures


def _row(cases: list[Case]) -> list[str]:
    told = sum((case.told for case in cases), Counter[str]())
    failed = {"failed": sum(case.failure is not None for case in cases)}
    slow = max(cases, key=lambda case: case.health_s)
    stalled = max(cases, key=lambda case: case.stream_s)
    return [
        ", ".join(f"{count} {what}" for what, count in (told + Counter(failed)).most_common()),
        f"{max(case.took_s for case in cases):.1f} s",
        _ms(slow.health_s),
        str(slow.seed),
        _ms(stalled.stream_s),
        str(stalled.seed),
    ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
