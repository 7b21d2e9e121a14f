"""A conversation in the terminal, with any source of answers."""

import contextlib
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

from legato.core.errors import InvalidRequestError


class AnswerPiece(NamedTuple):
    """A piece of an answer.

    Attributes:
        thought: text of the model's thinking, which is no part of the answer.
        num_tokens: tokens of the answer so far, thoughts included; 0 if that is not known.
    """

    text: str = ""
    thought: str = ""
    num_tokens: int = 0


Message = dict[str, Any]  # keys "role" and "content"
Answer = Callable[[list[Message]], Generator[AnswerPiece]]
"""Takes the messages so far, and yields the pieces of the answer to the last one.

Raises:
    InvalidRequestError: they cannot be answered; the message says why.
"""

HELP = (
    "Ctrl-C stops an answer, /reset starts anew, /timings and /thinking are of the last answer, "
    "/help tells this, /exit or Ctrl-D ends."
)
_DIM, _PLAIN = "\N{ESCAPE}[2m", "\N{ESCAPE}[0m"
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
    shown = _Shown()
    print(HELP)
    for line in _lines():
        if line in _EXIT:
            return
        if line in _RESET:
            messages = list(opening)
        elif line == "/help":
            print(HELP)
        elif line == "/timings":
            print(shown.timings or "there is no answer yet")
        elif line == "/thinking":
            print(shown.thoughts.strip() or "the last answer came without thinking")
        elif _COMMAND.fullmatch(line):
            print(f"legato: there is no {line}. {HELP}", file=sys.stderr)
        else:
            shown = _take_turn(answer, messages, line)


class _Shown:
    """An answer that is shown as it comes.

    Attributes:
        text: the answer, or its part before Ctrl-C.
        thoughts: the model's thinking before it.
    """

    def __init__(self) -> None:
        self.text = self.thoughts = ""
        self._num_tokens = 0
        self._asked_s = time.monotonic()
        self._times_s: list[float] = []  # of the first piece and of the latest

    def show(self, pieces: Generator[AnswerPiece]) -> None:
        """Print pieces as they come, thoughts dimmed and on a terminal only."""
        is_terminal = sys.stdout.isatty()
        try:
            with contextlib.closing(pieces):
                for piece in pieces:
                    self._take(piece)
                    if piece.thought and is_terminal:
                        print(f"{_DIM}{piece.thought}{_PLAIN}", end="", flush=True)
                    if piece.text and is_terminal and self.thoughts and self.text == piece.text:
                        print("\n")
                    print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            pass
        finally:
            print()
        if is_terminal and self.timings:
            print(f"{_DIM}{self.timings}{_PLAIN}")

    @property
    def timings(self) -> str:
        """How fast the answer came; empty if nothing came."""
        if not self._times_s:
            return ""
        first_s, last_s = self._times_s[0], self._times_s[-1]
        told = f"first token after {first_s - self._asked_s:.2f} s"
        if self._num_tokens < 2 or last_s == first_s:
            return told
        gap_s = (last_s - first_s) / (self._num_tokens - 1)
        return (
            f"{told}, {self._num_tokens:,} tokens, {1e3 * gap_s:.1f} ms each, {1 / gap_s:.0f} a "
            "second"
        )

    def _take(self, piece: AnswerPiece) -> None:
        self.text += piece.text
        self.thoughts += piece.thought
        self._num_tokens = piece.num_tokens or self._num_tokens
        if piece.text or piece.thought:
            self._times_s = [*self._times_s[:1], time.monotonic()]


def _take_turn(answer: Answer, messages: list[Message], line: str) -> _Shown:
    """Append the question and its answer, or neither if there is no answer."""
    shown = _Shown()
    messages.append({"role": "user", "content": line})
    try:
        shown.show(answer(messages))
    except InvalidRequestError as error:
        messages.pop()
        print(f"legato: {error}", file=sys.stderr)
    else:
        messages.append({"role": "assistant", "content": shown.text})
    return shown


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
