"""The flags of `legato serve`, as its parser has them."""

import argparse
from collections.abc import Callable, Iterator, Mapping

from legato.cli.main import full_parser
from scripts.api_reference import limits
from scripts.api_reference.markdown import clause, code, items


def parts() -> Mapping[str, Callable[[], str]]:
    """Key a part of the page; value writes it."""
    return {"flags-of-legato-serve": _flags_of_serve}


def _flags_of_serve() -> str:
    return "\n\n".join(
        f"## {title}\n{items(rows)}" for title, rows in _groups("serve") if title != limits.GROUP
    )


def _groups(command: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Headings of a command's help, each with the flags below it."""
    parser = _command(full_parser(), command)
    for group in parser._action_groups:
        rows = [_row(action) for action in group._group_actions if action.option_strings]
        if rows and group.title is not None:
            yield group.title, rows


def _command(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            command: argparse.ArgumentParser = action.choices[name]
            return command
    raise ValueError(f"{parser.prog} has no commands")


def _row(action: argparse.Action) -> tuple[str, str]:
    long = [option for option in action.option_strings if option.startswith("--")]
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
    flag = f"{long[0]} {value}".rstrip()
    words = (action.help or "") % {**vars(action), "prog": "legato serve"}
    return code(flag), clause(words)
