"""The `legato` command."""

import argparse
import sys
from collections.abc import Callable, Sequence

from legato.cli import (
    bench,
    calibrate,
    chat,
    demo,
    explain,
    generate,
    serve,
    simulate,
    trace,
    tune,
)
from legato.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from legato.core.memory import check_address_space, describe_shortage, is_shortage
from legato.core.version import __version__

_FAILURE = 1
_USAGE_ERROR = 2
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(argv)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="legato", description="LLM serving whose streams never stall.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"legato {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (
        serve,
        generate,
        chat,
        demo,
        calibrate,
        bench,
        simulate,
        tune,
        explain,
        trace,
    ):
        command.add_parser(subparsers)
    return parser
