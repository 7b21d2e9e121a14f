"""`legato serve`: the OpenAI-compatible server."""

import argparse
import logging
import sys
from typing import TYPE_CHECKING

from legato.cli.flags import add_engine_flags, byte_size, engine_config
from legato.core.errors import ConfigError

if TYPE_CHECKING:
    from legato.engine.messages import EngineInfo

_LOG_LEVELS = ("debug", "info", "warning", "error")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible HTTP API",
        description="Serve a model over an OpenAI-compatible HTTP API.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "positional_model", nargs="?", metavar="MODEL", help="the model; the same as --model"
    )
    add_engine_flags(parser)
    _add_server_flags(parser.add_argument_group("server"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped; returns the exit status."""
    from legato.server.config import ServerConfig
    from legato.server.run import serve

    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    _merge_model(args)
    server_config = ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=_api_keys(args.api_key),
        served_model_name=args.served_model_name,
        max_body_bytes=args.max_body_size,
        trust_request_chat_template=args.trust_request_chat_template,
    )
    return serve(engine_config(args), server_config, on_ready=_announce)


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    group.add_argument("--port", type=int, default=8000, help="%(default)s; 0 takes a free one")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="ask clients for this key; may be repeated, or list several with commas",
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in the API (default: MODEL)"
    )
    group.add_argument(
        "--max-body-size",
        type=byte_size,
        default="32M",
        metavar="SIZE",
        help="largest request body (%(default)s)",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let clients send chat templates, which are programs that this server would run",
    )
    group.add_argument("--log-level", choices=_LOG_LEVELS, default="info", help="%(default)s")


def _merge_model(args: argparse.Namespace) -> None:
    if args.positional_model is None:
        return
    if getattr(args, "model", args.positional_model) != args.positional_model:
        raise ConfigError(f"two models were named: {args.positional_model} and {args.model}")
    args.model = args.positional_model


def _api_keys(flags: list[str]) -> tuple[str, ...]:
    keys = tuple(key for flag in flags for key in flag.split(",") if key)
    if flags and not keys:
        raise ConfigError("--api-key is empty")
    return keys


def _announce(info: "EngineInfo", url: str) -> None:
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
    sys.stdout.flush()
