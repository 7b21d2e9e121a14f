"""Benchmarks in the terminal: progress while they run, tables at the end."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from legato.cli.table import duration, percentile_of
from legato_lab.capacity.trial import Trial
from legato_lab.report.report_file import SweepPoint
from legato_lab.simulation.record import OnProgress, Status

_REFRESHES_PER_S = 2  # drawing takes time from the server


def print_point(point: SweepPoint, label: str) -> None:
    """Print a line for a finished point."""
    summary = point.run.summary
    itl, ttft = (percentile_of(values_s, "p99") for values_s in (summary.itl_s, summary.ttft_s))
    Console(stderr=True, highlight=False).print(
        f"{label}: {point.throughput.output_tokens_per_s:.0f} tokens/s, ITL p99 {itl}, TTFT p99 "
        f"{ttft}; {len(point.run.records)} requests in {duration(summary.duration_s)}"
    )


def print_trial(trial: Trial) -> None:
    """Print a line for a trial with its verdict."""
    verdict = "sustained" if trial.is_sustained else f"not sustained ({', '.join(trial.broken)})"
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"{trial.rate_per_s:.3g}/s {verdict}: {trial.num_requests} requests in "
        f"{trial.measured_s:.0f} s, ITL p99 {duration(trial.p99_itl_s)}, median delay "
        f"{duration(trial.median_delay_s)}, {trial.num_failed} failed"
    )


@contextmanager
def step_bar(description: str, num_steps: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of steps on stderr; yields a function that takes the number done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(description, total=num_steps)
        yield lambda num_done: progress.update(task, completed=num_done)


@contextmanager
def progress_bar(description: str, num_requests: int | None) -> Iterator[OnProgress]:
    """Show a workload's progress on stderr; yields the callback for `send_workload`.

    Args:
        num_requests: None if not known yet.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[num_in_flight]} in flight, {task.fields[num_refused]} refused"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns,
        console=console,
        refresh_per_second=_REFRESHES_PER_S,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(description, total=num_requests, num_in_flight=0, num_refused=0)

        def update(counts: Counter[Status]) -> None:
            num_in_flight = counts["cancelled"]
            progress.update(
                task,
                completed=counts.total() - num_in_flight,
                num_in_flight=num_in_flight,
                num_refused=counts["refused"],
            )

        yield update
