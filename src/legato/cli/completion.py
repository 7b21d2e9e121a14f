"""`legato completion`: scripts that complete commands and flags in a shell."""

import argparse
from pathlib import Path
from typing import Any

_SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "MODEL", "JSON", "HTML", "TRACE")
_FOLDER = "FOLDER"

_DESCRIPTION = """\
Print a script that completes commands, flags and their values. To have it in every shell:
  bash  legato completion bash > ~/.local/share/bash-completion/completions/legato
  zsh   legato completion zsh > ~/.zfunc/_legato    (with ~/.zfunc in fpath, before compinit)
  fish  legato completion fish > ~/.config/fish/completions/legato.fish"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "completion",
        help="complete commands and flags in a shell",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=_SHELLS, help="which shell's script")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script; returns the exit status."""
    import shtab

    from legato.cli.main import full_parser

    parser = full_parser()
    _complete_paths(parser)
    print(shtab.complete(parser, shell=args.shell))
    return 0


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    """Mark the values that are paths: shtab reads an action's `complete`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command)
        elif kind := _path_kind(action):
            action.complete = kind  # type: ignore[attr-defined]


def _path_kind(action: argparse.Action) -> Any:
    import shtab

    metavar = str(action.metavar)
    if metavar == _FOLDER:
        return shtab.DIRECTORY
    is_file = action.type is Path or metavar.partition("|")[0] in _FILES
    return shtab.FILE if is_file else None
