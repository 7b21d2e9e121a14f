"""The command line's parser: argparse, with two-line errors that suggest what was meant.

Underscores in a flag's name may stand for its dashes, as in vLLM. The help of a command with many
flags opens on one screen, and `--help all` lists all flags.
"""

import argparse
import itertools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from legato.cli.foreign_flags import foreign_flag_note, is_flag, known_value, unknown_flag
from legato.core.errors import ConfigError

if TYPE_CHECKING:
    from legato.cli.config_file import ConfigEntry

_USAGE_ERROR = 2
_BLAMED = re.compile(r"argument (\S+): ")  # the start of argparse's errors about a value
_ALL = "all"
_KIND = "KIND"  # the placeholder of a value with many choices
_MOST_CHOICES = 16  # characters


class _HelpOrAll(argparse.Action):
    """Shows the first screen of a command's help, or with the value "all" all of it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> NoReturn:
        assert isinstance(parser, CommandParser)
        print(parser.format_help() if values == _ALL else parser.first_screen(), end="")
        parser.exit()


class CommandParser(argparse.ArgumentParser):
    """Parses a command's flags, and those of a file, if the command has the flag --config.

    The namespace then gets `configured`, the destinations that the file sets.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self._places: dict[str, str] = {}  # key: option set in a file; value: its place
        self._examples: Sequence[str] = ()
        self._brief: Mapping[str, str] = {}

    def open_with(self, examples: Sequence[str], brief: Mapping[str, str]) -> None:
        """Show examples and a few flags in the help; `--help all` shows every flag.

        The parser must have been made without `add_help`.

        Args:
            examples: command lines.
            brief: key a flag that the parser has or will have, value its meaning in a few words.
        """
        self._examples, self._brief = examples, brief
        self.add_argument(
            *("-h", "--help"),
            action=_HelpOrAll,
            nargs="?",
            metavar=_ALL,
            help="show the flags that most people need, or all, and exit",
        )

    def first_screen(self) -> str:
        """Return the help that `open_with` describes, at most 24 lines of 80 characters."""
        shown = [
            (f"{option} {self._placeholder(option)}".rstrip(), text)
            for option, text in self._brief.items()
        ]
        width = max(len(flag) for flag, _ in shown)
        return "\n".join(
            [
                f"usage: {self.prog} [MODEL] [flags]",
                *(f"  {example}" for example in self._examples),
                "",
                *(f"  {flag:{width}}  {text}" for flag, text in shown),
                "",
                f"{self.prog} --help all lists all flags.\n",
            ]
        )

    def _placeholder(self, option: str) -> str:
        action = self._option_string_actions[option]
        if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
            return ""
        choices = "|".join(map(str, action.choices or ()))
        named = action.metavar or (_KIND if len(choices) > _MOST_CHOICES else choices)
        text = str(named or action.dest.upper())
        # Words beside a value are for `--help all`.
        return text.rpartition("|")[2] if len(text) > _MOST_CHOICES else text

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = _dashed(sys.argv[1:] if args is None else args)
        if self._subparsers is None:
            self._refuse_unknown(given)
            if self._knows("--config"):
                given, namespace = self._with_config(given, namespace or argparse.Namespace())
        parsed, unknown = super().parse_known_args(given, namespace)
        if unknown:
            self.error(f"unexpected: {' '.join(unknown)}{self._without_dashes(given)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        blamed = _BLAMED.match(message)
        options = blamed[1].split("/") if blamed else []
        place = next((self._places[name] for name in options if name in self._places), None)
        listed = "flags" if self._subparsers is None else "commands"
        help_ = f"--help {_ALL}" if self._brief else "--help"
        self.exit(
            _USAGE_ERROR,
            f"legato: {f'{place}: ' if place else ''}{message}\n"
            f"{self.prog} {help_} lists the {listed}\n",
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"{value!r} is none of {', '.join(known)}{known_value(str(value), known)}"
            )

    def _refuse_unknown(self, args: Sequence[str]) -> None:
        """Refuse unknown flags first: a missing flag may be one of them, misspelt."""
        given = [*_before_end_of_flags(args)]
        for before, arg, following in zip(["", *given], given, [*given[1:], ""], strict=False):
            name, equals, value = arg.partition("=")
            if not is_flag(name, before) or self._knows(name):
                continue
            # argparse takes a flag with a space for a value.
            if " " not in arg or foreign_flag_note(name):
                value = value if equals else following
                self.error(unknown_flag(name, self._option_string_actions, value))

    def _without_dashes(self, args: Sequence[str]) -> str:
        """Return a hint at the first word that is a flag's name without its dashes."""
        words = (f"--{arg.partition('=')[0].replace('_', '-')}" for arg in args)
        meant = next(filter(self._knows, words), None)
        return f"; did you mean {meant}?" if meant else ""

    def _knows(self, option: str) -> bool:
        return option in self._option_string_actions

    def _with_config(
        self, args: list[str], namespace: argparse.Namespace
    ) -> tuple[list[str], argparse.Namespace]:
        """Put the file's arguments in front, except flags that the command line overrides."""
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        finder.add_argument("--config")
        try:
            path = finder.parse_known_args(args)[0].config
            entries = [] if path is None else self._entries(path)
        except argparse.ArgumentError as error:
            self.error(str(error))
        except ConfigError as error:
            self.exit(_USAGE_ERROR, f"legato: {error}\n")
        named = {arg.partition("=")[0] for arg in _before_end_of_flags(args)}
        overridden = self._excluded(named & self._option_string_actions.keys())
        kept = [entry for entry in entries if self._dest(entry) not in overridden]
        namespace.configured = frozenset(map(self._dest, kept))
        self._places = {entry.option: entry.place for entry in kept}
        return [*(arg for entry in kept for arg in entry.arguments), *args], namespace

    def _entries(self, path: str) -> "list[ConfigEntry]":
        from legato.cli.config_file import read_config_file

        return read_config_file(path, self)

    def _dest(self, entry: "ConfigEntry") -> str:
        return self._option_string_actions[entry.option].dest

    def _excluded(self, options: Iterable[str]) -> set[str]:
        """Return the destinations of these options, and of options that exclude them."""
        dests = {self._option_string_actions[option].dest for option in options}
        for group in self._mutually_exclusive_groups:
            rivals = {action.dest for action in group._group_actions}
            if rivals & dests:
                dests |= rivals
        return dests


def _dashed(args: Sequence[str]) -> list[str]:
    """Return the arguments with dashes in the names of all flags."""
    flags = [_dashed_flag(arg) for arg in _before_end_of_flags(args)]
    return [*flags, *args[len(flags) :]]


def _dashed_flag(arg: str) -> str:
    name, equals, value = arg.partition("=")
    is_flag = name.startswith("--") and " " not in name
    return name.replace("_", "-") + equals + value if is_flag else arg


def _before_end_of_flags(args: Sequence[str]) -> Iterable[str]:
    return itertools.takewhile(lambda arg: arg != "--", args)
