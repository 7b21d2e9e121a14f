"""The `legato` command."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from legato.cli.command_parser import CommandParser
from legato.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from legato.core.memory_limits import check_address_space, describe_shortage, is_shortage
from legato.core.version import __version__

_SERVING, _LAB = "legato.cli", "legato_lab.commands"
_COMMANDS = {
    "serve": _SERVING,
    "fleet": _SERVING,
    "generate": _SERVING,
    "chat": _SERVING,
    "demo": _LAB,
    "calibrate": _SERVING,
    "bench": _LAB,
    "simulate": _LAB,
    "tune": _LAB,
    "explain": _SERVING,
    "trace": _SERVING,
    "models": _SERVING,
    "completion": _SERVING,
}
"""Key a command, value the package of its module."""
_FAILURE = 1
_USAGE_ERROR = 2
_INTERRUPTED = 130  # 128 + SIGINT, as in shells


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(_asked_for(argv)).parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        if getattr(args, "loads_model", False):
            check_address_space()
        return run(args)
    except (ConfigError, InvalidRequestError, UnsupportedModelError) as error:
        print(f"legato: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except Exception as error:
        if not is_shortage(error):
            raise
        print(f"legato: {describe_shortage(error)}", file=sys.stderr)
        return _FAILURE
    except KeyboardInterrupt:
        return _INTERRUPTED


def full_parser() -> CommandParser:
    """Return the parser of all commands."""
    return _parser([*_COMMANDS])


def _asked_for(argv: Sequence[str]) -> Sequence[str]:
    """Return only the command named first, to save the others' imports; otherwise all."""
    return argv[:1] if argv and argv[0] in _COMMANDS else [*_COMMANDS]


def _parser(commands: Sequence[str]) -> CommandParser:
    parser = CommandParser(prog="legato", description="LLM serving whose streams never stall.")
    parser.add_argument("--version", action="version", version=f"legato {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        import_module(f"{_COMMANDS[command]}.{command}").add_parser(subparsers)
    return parser
