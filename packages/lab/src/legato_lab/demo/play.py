"""Plays the demo: shows one policy after another as it runs."""

import io
import re
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.live import Live

from legato.cli.table import duration
from legato_lab.demo.stage import DemoRun, Stage, demo_policies
from legato_lab.demo.traffic import Traffic
from legato_lab.demo.view import View

_REFRESHES_PER_S = 6  # drawing takes time from the steps
_SVG_COLUMNS = 100
_SHOWN_SHARE = 0.6
_WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def play(view: View, stage: Stage, traffic: Traffic, console: Console) -> None:
    """Serve the traffic with each policy; draw it in a terminal, print a line elsewhere.

    Raises:
        KeyboardInterrupt: the user stopped it; the view has the finished runs.
    """
    policies = demo_policies(traffic.itl_slo_s)
    with _shown(view, console):
        for number, (name, config) in enumerate(policies.items(), start=1):
            run = DemoRun(name, traffic)
            view.begin(run, f"{number} of {len(policies)}")
            try:
                stage.serve(run, config)
            except KeyboardInterrupt:
                view.drop()
                raise
            if not console.is_terminal:
                console.print(f"{number} of {len(policies)}, {_line(run)}", soft_wrap=True)


def write_svg(view: View, path: Path) -> None:
    """Write the picture at the time when the last policy had computed most of its long prompt.

    Raises:
        OSError: the file cannot be written.
    """
    run = view.runs[-1]
    most = _SHOWN_SHARE * run.traffic.long_prompt
    computed_s = next(at_s for at_s, num_computed in run.progress if num_computed >= most)
    moment_s = next(at_s for at_s in run.token_times_s[0] if at_s >= computed_s)
    console = Console(record=True, width=_SVG_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(view.at(moment_s, _SVG_COLUMNS))
    # rich's picture would load its font from the web.
    svg = _WEB_FONTS.sub("", console.export_svg(title="legato demo"))
    path.write_text(svg, encoding="utf-8")


def _shown(view: View, console: Console) -> "Live | nullcontext[None]":
    if not console.is_terminal:
        return nullcontext()
    return Live(view, console=console, refresh_per_second=_REFRESHES_PER_S)


def _line(run: DemoRun) -> str:
    result = run.result()
    longest_s = float(result.itl_s(during=True).max())
    return (
        f"{run.name}: longest wait of a stream {duration(longest_s)}, "
        f"first token of the long prompt after {duration(result.ttft_s)}"
    )
