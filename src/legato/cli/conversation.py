"""A conversation in the terminal, with any source of answers."""

import contextlib
import re
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

from legato.core.errors import InvalidRequestError

Message = dict[str, Any]  # keys "role" and "content"
Answer = Callable[[list[Message]], Generator[str]]
"""Takes the messages so far, and yields the pieces of the answer to the last one.

Raises:
    InvalidRequestError: they cannot be answered; the message says why.
"""

HELP = "Ctrl-C stops an answer, /reset starts anew, /help tells this, /exit or Ctrl-D ends."
_COMMAND = re.compile(r"/\w+")
_RESET = ("/reset", "/clear")
_EXIT = ("/exit", "/quit")


def converse(answer: Answer, system: str | None) -> None:
    """Read lines and answer them until the input ends.

    Args:
        system: the description of the model's role.
    """
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    print(HELP)
    for line in _lines():
        if line in _EXIT:
            return
        if line in _RESET:
            messages = list(opening)
        elif line == "/help":
            print(HELP)
        elif _COMMAND.fullmatch(line):
            print(f"legato: there is no {line}. {HELP}", file=sys.stderr)
        else:
            _take_turn(answer, messages, line)


def _take_turn(answer: Answer, messages: list[Message], line: str) -> None:
    """Append the question and its answer, or neither if there is no answer."""
    messages.append({"role": "user", "content": line})
    try:
        messages.append({"role": "assistant", "content": _show(answer(messages))})
    except InvalidRequestError as error:
        messages.pop()
        print(f"legato: {error}", file=sys.stderr)


def _show(pieces: Generator[str]) -> str:
    """Print an answer as it comes; return it, or its part before Ctrl-C."""
    text = ""
    try:
        with contextlib.closing(pieces):
            for piece in pieces:
                text += piece
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    finally:
        print()
    return text


def _lines() -> Iterator[str]:
    """Yield the user's lines, without empty ones."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  gives input() its line editing
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print(f"\n{HELP}", end="")
            continue
        if line:
            yield line
