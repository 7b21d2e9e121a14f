"""Draws the demo in the terminal: streams that get tokens, streams that wait, and for how long."""

import math
import time
from bisect import bisect_left, bisect_right
from itertools import pairwise

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from legato.cli.table import duration
from legato_lab.demo.stage import DemoRun

_NAME_COLUMNS = 26
_TIME_COLUMNS = 22
_FRAME_COLUMNS = 8
_FEWEST, _MOST = 16, 60  # columns of a strip
_WINDOW_S = 5.0  # of the current run
_LEVELS = "▁▂▃▄▅▆▇█"
_STALLED = "·"
_IN_TIME, _LATE = "green", "bold red"
_HINT = "Ctrl-C compares what has run so far"


class View:
    """The display, which rich draws repeatedly.

    Args:
        title: the traffic and the machine.

    Attributes:
        runs: so far; the last one may still run.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._progress = ""
        self.runs: list[DemoRun] = []

    def begin(self, run: DemoRun, progress: str) -> None:
        """Show a new run. Args: `progress`: such as "2 of 4"."""
        self._progress = progress
        self.runs.append(run)

    def drop(self) -> None:
        """Remove the latest run, which did not finish."""
        self.runs.pop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.at(time.monotonic(), options.max_width)

    def at(self, now_s: float, width: int) -> Panel:
        """Draw the runs as of a moment since the last one began. Args: width: in columns."""
        room = width - _NAME_COLUMNS - _TIME_COLUMNS - _FRAME_COLUMNS
        columns = min(_MOST, max(_FEWEST, room))
        blocks = [
            _finished(run, columns)
            if run.ended_s is not None and run.ended_s <= now_s
            else _current(run, now_s, columns, self._progress)
            for run in self.runs
        ]
        ended_s = self.runs[-1].ended_s if self.runs else None
        return Panel(
            Group(*blocks),
            title=self._title,
            title_align="left",
            subtitle=_HINT if ended_s is None or ended_s > now_s else None,
            subtitle_align="left",
            padding=(0, 1),
        )


def strip(
    times_s: list[float], span_s: tuple[float, float], columns: int, *, now_s: float, slo_s: float
) -> Text:
    """Draw one stream's tokens over a span: higher for more tokens in a column, red if late.

    Args:
        times_s: when its tokens came, ascending, up to `now_s`.
        span_s: [start, end).
        slo_s: the longest gap that is in time.
    """
    start_s, end_s = span_s
    edges_s = [start_s + (end_s - start_s) * i / columns for i in range(columns + 1)]
    firsts = [bisect_left(times_s, edge_s) for edge_s in edges_s]
    counts = [last - first for first, last in pairwise(firsts)]
    most = max(counts)
    drawn = Text()
    for count, (left_s, right_s) in zip(counts, pairwise(edges_s), strict=True):
        level = _LEVELS[math.ceil(count / most * len(_LEVELS)) - 1] if count else _STALLED
        gap_s = _gap_s(times_s, (left_s + right_s) / 2, now_s) if left_s < now_s else 0.0
        drawn.append(level if gap_s else " ", _LATE if gap_s > slo_s else _IN_TIME)
    return drawn


def _gap_s(times_s: list[float], at_s: float, now_s: float) -> float:
    """Return the length of the gap between tokens around a moment; 0 before the first token."""
    after = bisect_right(times_s, at_s)
    if not after:
        return 0.0
    return (times_s[after] if after < len(times_s) else now_s) - times_s[after - 1]


def _finished(run: DemoRun, columns: int) -> Table:
    """Draw a finished run with one stream's strip: all get their tokens in the same steps."""
    assert run.ended_s is not None
    result, slo_s = run.result(), run.traffic.itl_slo_s
    longest_s = float(result.itl_s(during=True).max())
    span_s = run.started_s, run.ended_s
    grid = _grid(columns)
    grid.add_row(
        Text(run.name, "bold"),
        strip(run.token_times_s[0], span_s, columns, now_s=run.ended_s, slo_s=slo_s),
        _colored(f"longest wait {duration(longest_s)}", longest_s, slo_s),
    )
    grid.add_row("", "", Text(f"prompt's TTFT {duration(result.ttft_s)}", "dim"))
    return grid


def _current(run: DemoRun, now_s: float, columns: int, progress: str) -> Group:
    """Draw a lane for each stream, the long prompt's progress, and the latest step."""
    start_s, slo_s = max(run.started_s, now_s - _WINDOW_S), run.traffic.itl_slo_s
    span_s = start_s, start_s + _WINDOW_S
    lanes = _grid(columns)
    for index, all_times_s in enumerate(run.token_times_s, start=1):
        times_s = all_times_s[: bisect_right(all_times_s, now_s)]
        waited_s = now_s - times_s[-1] if times_s else 0.0
        lanes.add_row(
            f"stream {index}",
            strip(times_s, span_s, columns, now_s=now_s, slo_s=slo_s),
            _colored(duration(waited_s), waited_s, slo_s),
        )
    total = run.traffic.long_prompt
    num_computed = max((num for at_s, num in run.progress if at_s <= now_s), default=0)
    lanes.add_row(
        Text("long prompt", "bold"),
        ProgressBar(total, num_computed, width=columns),
        f"{num_computed:,} of {total:,}",
    )
    title = Text.assemble((f"{progress}: ", "dim"), (run.name, "bold"))
    return Group(Rule(title, align="left"), lanes, _latest_step(run, now_s))


def _latest_step(run: DemoRun, now_s: float) -> Text:
    """Describe the latest step's contents."""
    index = bisect_right(run.steps, now_s, key=lambda step: step.ended_s)
    if not index:
        return Text("")
    step = run.steps[index - 1]
    num_streams = sum(chunk.kind != "prefill" for chunk in step.chunks)
    num_drafts, num_right = step.num_draft_tokens, step.num_accepted_tokens
    drafts = f" with {num_drafts} drafts ({num_right} right)" if num_drafts else ""
    held = f"{num_streams} streams{drafts} and {step.num_prefill_tokens} prompt tokens"
    return Text(f"latest step: {held}, {duration(step.seconds)}", "dim")


def _grid(columns: int) -> Table:
    """Make a grid of name, strip and time."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=_NAME_COLUMNS, no_wrap=True)
    grid.add_column(width=columns, no_wrap=True)
    grid.add_column(justify="right", width=_TIME_COLUMNS, no_wrap=True)
    return grid


def _colored(text: str, gap_s: float, slo_s: float) -> Text:
    """Color a gap's text: red if it is longer than promised."""
    return Text(text, _LATE if gap_s > slo_s else _IN_TIME)
