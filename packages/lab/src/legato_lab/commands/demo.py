"""`legato demo`: the same traffic under four policies, in less than two minutes."""

import argparse
import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from legato.cli.flags import add_flags, add_machine_flags, engine_config
from legato.cli.values import count, duration_s
from legato.core.config import CalibrationConfig
from legato.core.errors import ConfigError
from legato.core.version import install_command

if TYPE_CHECKING:
    from rich.console import Console

_FORMATS = (".png", ".svg", ".pdf")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "demo",
        help="see what a long prompt does to running streams",
        description="Serve the same traffic, eight streams and then a long prompt, with whole "
        "prompts, prefill first, a fixed number of tokens and a fixed time a step; on the real "
        "model, in less than two minutes.",
    )
    parser.add_argument(
        "--toy",
        action="store_true",
        help="only print the textbook's example, two short prompts and four tokens a step",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default="demo.png",
        metavar="FILE",
        help="picture of the comparison (%(default)s; needs the extra legato-llm[bench])",
    )
    parser.add_argument(
        "--terminal-svg", type=Path, metavar="FILE", help="also write what the terminal showed"
    )
    parser.add_argument(
        "--itl-slo",
        dest="itl_slo_s",
        type=duration_s,
        metavar="TIME",
        help="what streams are promised (default: six times what a step of theirs takes)",
    )
    parser.add_argument(
        "--long-prompt",
        type=count,
        metavar="TOKENS",
        help="its length (default: what this machine computes in four seconds, 7000 at most)",
    )
    add_machine_flags(parser)
    add_flags(parser, CalibrationConfig, only=("calibration_dir",))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show, compare and plot; returns the exit status."""
    from rich.console import Console

    console = Console(highlight=False)
    if args.toy:
        _print_toy(console)
        return 0
    for path in filter(None, (args.output, args.terminal_svg)):
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent}")
    if args.output.suffix not in _FORMATS:
        raise ConfigError(f"{args.output} is none of {', '.join(_FORMATS)}")
    # The display itself says which promises were broken.
    logging.basicConfig(level=logging.ERROR)
    _print_toy(console)
    _play(args, console)
    return 0


def _print_toy(console: "Console") -> None:
    from legato_lab.demo.toy import toy_tables

    for table in toy_tables():
        console.print(table)


def _play(args: argparse.Namespace, console: "Console") -> None:
    from legato.cli.table import print_table
    from legato_lab.demo.comparison import comparison, plot, verdict
    from legato_lab.demo.play import play, write_svg
    from legato_lab.demo.stage import Stage
    from legato_lab.demo.traffic import sized_traffic
    from legato_lab.demo.view import View

    console.print("Loading the model; the first time, ten seconds go into measuring its steps.")
    stage = Stage(engine_config(args))
    stage.warm_up()
    traffic = sized_traffic(
        stage.step_time,
        stage.longest_request,
        itl_slo_s=args.itl_slo_s,
        long_prompt=args.long_prompt,
    )
    title = f"{traffic.num_streams} streams and a prompt of {traffic.long_prompt:,} tokens"
    console.print(f"{title}: {stage.name}", soft_wrap=True)
    view = View(title)
    try:
        play(view, stage, traffic, console)
    except KeyboardInterrupt:
        if view.runs:
            print_table(comparison(view.runs))
        console.print("cancelled")
        raise
    print_table(comparison(view.runs))
    console.print(verdict(view.runs), soft_wrap=True)
    if args.terminal_svg is not None:
        write_svg(view, args.terminal_svg)
    if importlib.util.find_spec("matplotlib") is None:
        console.print(f"no picture, for want of matplotlib: {install_command('bench')}")
        return
    plot(view.runs, args.output, f"{title}\n{stage.name}")
    console.print(f"plotted to {args.output}")
