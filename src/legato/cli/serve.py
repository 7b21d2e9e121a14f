"""`legato serve`: the OpenAI-compatible server."""

import argparse
import sys
from typing import TYPE_CHECKING

from legato.cli.command_parser import CommandParser
from legato.cli.flags import (
    add_config_flag,
    add_engine_flags,
    add_log_flags,
    add_model_argument,
    add_server_flags,
    brief,
    engine_config,
    merge_model,
    server_config,
)
from legato.core.config import EngineConfig
from legato.core.logs import configure_logging

if TYPE_CHECKING:
    from legato.engine.process.engine_messages import EngineInfo

_EXAMPLES = (
    "legato serve                            the small default model",
    "legato serve ./model.gguf --port 9000   a GGUF file, or a folder",
    "legato serve Qwen/Qwen3-0.6B            a model of the Hugging Face hub",
)
_BRIEF = brief(
    *("--host", "--port", "--api-key", "--served-model-name"),
    *("--max-model-len", "--quantization", "--kv-cache-memory", "--max-num-seqs"),
    *("--num-threads", "--itl-slo", "--config", "--dry-run"),
)


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    parser: CommandParser = subparsers.add_parser(
        "serve",
        add_help=False,
        help="serve a model over an OpenAI-compatible HTTP API",
        description="Serve a model over an OpenAI-compatible HTTP API.",
    )
    parser.open_with(_EXAMPLES, _BRIEF)
    add_model_argument(parser)
    add_config_flag(parser)
    add_engine_flags(parser)
    add_server_flags(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="say what would happen here: kernels, memory, context, flags with every default, what "
        "is refused, and the speed that a probe of a second expects; then end",
    )
    add_log_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped; returns the exit status."""
    from legato.api.run import check_server, serve

    configure_logging(args.log_level, args.log_format)
    merge_model(args)
    config, server = engine_config(args), server_config(args)
    if args.dry_run:
        check_server(config, server)
        return _print_dry_run(config)
    return serve(config, server, on_ready=announce)


def _print_dry_run(config: EngineConfig) -> int:
    from legato.cli.models import here_lines, print_lines
    from legato.engine.build.dry_run import dry_run

    run = dry_run(config)
    print_lines(f"legato serve {config.model.model}", here_lines(run))
    return 1 if run.refusals else 0


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
    console.print(f"Chat: {url}   Dashboard: {url}/dashboard")
    sys.stdout.flush()
