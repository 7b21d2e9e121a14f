"""The `legato` command."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from legato.cli.command_parser import CommandParser
from legato.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from legato.core.memory_limits import check_address_space, describe_shortage, is_shortage
from legato.core.version import __version__, install_command


class _Plugin(NamedTuple):
    """A command of another distribution, found by entry point and loaded only when it is named.

    Attributes:
        extra: the one of `legato-llm` that brings it, and what it cannot do without.
        help: as its own parser says it.
    """

    extra: str
    help: str


_COMMANDS: Mapping[str, _Plugin | None] = {
    "serve": None,
    "fleet": _Plugin("fleet", "serve a model by several engines, on Ray Serve"),
    "generate": None,
    "chat": None,
    "demo": _Plugin("lab", "see what a long prompt does to running streams"),
    "calibrate": None,
    "bench": _Plugin("bench", "load and measure any OpenAI-compatible server"),
    "simulate": _Plugin("bench", "compare scheduling policies without a machine to run them on"),
    "tune": _Plugin("tune", "find the settings of a server for a workload and its SLOs"),
    "explain": None,
    "trace": None,
    "models": None,
    "completion": None,
}
"""Key a command; value None for a module of this package."""
_DESCRIPTION = """\
LLM serving whose streams never stall.

  legato serve ./model.gguf                 a server, and a page to chat at its address
  legato chat --url http://127.0.0.1:8000   a chat with it in the terminal
  legato models ./model.gguf                how a model would run here, and how fast"""
_ENTRY_POINTS = "legato.commands"
_KERNELS = ("amx", "avx512", "avx2", "plain")
_FAILURE = 1
_USAGE_ERROR = 2
_INTERRUPTED = 130  # 128 + SIGINT, as in shells


class _Version(argparse.Action):
    """Shows the version, what the kernels were built for and which run here."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: Any,  # noqa: ARG002
        option_string: str | None = None,  # noqa: ARG002
    ) -> NoReturn:
        print(f"legato {__version__}")
        print(f"build: {_build()}")
        parser.exit()


def _build() -> str:
    """Describe the installation, without torch, which takes seconds to load."""
    import platform
    from importlib.metadata import version
    from importlib.util import find_spec

    machine = (
        f"Python {platform.python_version()} on {platform.machine()}, torch {version('torch')}"
    )
    built = [name for name in _KERNELS if find_spec(f"legato._kernels_{name}")]
    if not built:
        return f"{machine}\nkernels: none built, torch computes the layers"
    from legato import _processor

    here = [name for name in _processor.instructions() if name in built]
    return f"{machine}\nkernels: {', '.join(here) or 'torch'} here, of {', '.join(built)} built"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = _parser(_asked_for(argv)).parse_args(argv)
        run: Callable[[argparse.Namespace], int] = args.run
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
    """Return the parser of all commands; one that cannot be loaded has a name and no flags."""
    return _parser({command: _installed(command) for command in _COMMANDS})


def _asked_for(argv: Sequence[str]) -> Mapping[str, ModuleType | None]:
    """Load only the command named first, to save the others' imports; else all but plugins.

    Raises:
        ConfigError: as `_module`.
    """
    if argv and argv[0] in _COMMANDS:
        return {argv[0]: _module(argv[0])}
    return {name: None if plugin else _module(name) for name, plugin in _COMMANDS.items()}


def _installed(command: str) -> ModuleType | None:
    try:
        return _module(command)
    except ConfigError:
        return None


def _module(command: str) -> ModuleType:
    """Import a command's module; raises `ConfigError` if its distribution is not usable."""
    plugin = _COMMANDS[command]
    if plugin is None:
        return import_module(f"legato.cli.{command}")
    from importlib.metadata import entry_points  # slow, and serving does without

    remedy = install_command(plugin.extra)
    found = [*entry_points(group=_ENTRY_POINTS, name=command)]
    if not found:
        raise ConfigError(f"{command} is not installed: {remedy}")
    try:
        module: ModuleType = found[0].load()
    except ImportError as error:
        raise ConfigError(f"{command} cannot be loaded ({error}): {remedy}") from error
    return module


def _parser(commands: Mapping[str, ModuleType | None]) -> CommandParser:
    """Make the parser of commands. Args: commands: value a module, or None for a name alone."""
    parser = CommandParser(
        prog="legato",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show version, build and kernels"
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command, module in commands.items():
        if module is not None:
            module.add_parser(subparsers)
        elif plugin := _COMMANDS[command]:
            subparsers.add_parser(command, help=plugin.help)
    return parser
