"""`legato serve`: the OpenAI-compatible server."""

import argparse
import logging
import sys
from typing import TYPE_CHECKING

from legato.cli.flags import (
    add_config_flag,
    add_engine_flags,
    add_server_flags,
    engine_config,
    server_config,
)
from legato.core.errors import ConfigError

if TYPE_CHECKING:
    from legato.engine.process.engine_messages import EngineInfo

LOG_LEVELS = ("debug", "info", "warning", "error")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible HTTP API",
        description="Serve a model over an OpenAI-compatible HTTP API.",
    )
    parser.add_argument(
        "positional_model", nargs="?", metavar="MODEL", help="the model; the same as --model"
    )
    add_config_flag(parser)
    add_engine_flags(parser)
    add_server_flags(parser)
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="%(default)s")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped; returns the exit status."""
    from legato.api.run import serve

    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    merge_model(args)
    return serve(engine_config(args), server_config(args), on_ready=announce)


def merge_model(args: argparse.Namespace) -> None:
    """Take the positional model; raises `ConfigError` if --model names another."""
    if args.positional_model is None:
        return
    is_other = getattr(args, "model", args.positional_model) != args.positional_model
    if is_other and "model" not in args.configured:
        raise ConfigError(f"two models were named: {args.positional_model} and {args.model}")
    args.model = args.positional_model


def announce(info: "EngineInfo", url: str) -> None:
    """Print the served model, its settings and its URL."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in info.settings.items():
        table.add_row(name, value, style="dim")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"Legato serves [bold]{info.served_model_name}[/bold] on {url} "
        f"(try: curl {url}/v1/completions -H 'Content-Type: application/json' "
        '-d \'{"prompt": "Once upon a time"}\')'
    )
    console.print(f"Dashboard: {url}/dashboard")
    sys.stdout.flush()
