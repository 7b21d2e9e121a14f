"""`legato fleet`: several engines behind one OpenAI-compatible server."""

import argparse

from legato.cli.command_parser import CommandParser
from legato.cli.flags import (
    add_config_flag,
    add_engine_flags,
    add_flags,
    add_log_flags,
    add_model_argument,
    add_server_flags,
    brief,
    engine_config,
    given_fields,
    merge_model,
    server_config,
)
from legato.cli.serve import announce
from legato.core.logs import configure_logging
from legato_fleet.config import FleetConfig

_EXAMPLES = ("legato fleet ./model.gguf --replicas 2",)
_BRIEF = {
    "--replicas": "engines, each with the whole model",
    **brief("--host", "--port", "--api-key", "--served-model-name", "--max-model-len"),
    **brief("--quantization", "--kv-cache-memory", "--max-num-seqs", "--itl-slo", "--config"),
}


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    parser: CommandParser = subparsers.add_parser(
        "fleet",
        add_help=False,
        help="serve a model by several engines, on Ray Serve",
        description="Serve a model by several engines, on Ray Serve, behind one "
        "OpenAI-compatible HTTP API.",
    )
    parser.open_with(_EXAMPLES, _BRIEF)
    add_model_argument(parser)
    add_config_flag(parser)
    add_flags(parser, FleetConfig)
    add_engine_flags(parser)
    add_server_flags(parser)
    add_log_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped; returns the exit status."""
    from legato_fleet.serving import serve_fleet

    configure_logging(args.log_level, args.log_format)
    merge_model(args)
    fleet = FleetConfig(**given_fields(args, FleetConfig))
    return serve_fleet(engine_config(args), server_config(args), fleet, on_ready=announce)
