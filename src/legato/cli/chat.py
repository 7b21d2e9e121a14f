"""`legato chat`: talk to a model in the terminal, without a server."""

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from legato.cli.flags import (
    add_engine_flags,
    add_sampling_flags,
    engine_config,
    with_sampling_flags,
)
from legato.core.errors import InvalidRequestError
from legato.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from legato.engine.llm import LLM
    from legato.engine.prompts import Message

_HELP = "Ctrl-C stops an answer, /clear starts anew, Ctrl-D ends."


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description=f"Talk to a model in the terminal. {_HELP}",
    )
    parser.add_argument("--system", metavar="TEXT", help="what the model is told about its role")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read lines and answer them until there are no more."""
    from legato.engine.llm import LLM

    llm = LLM.from_config(engine_config(args))
    defaults = msgspec.structs.replace(llm.get_default_sampling_params(), max_tokens=None)
    params = with_sampling_flags(args, defaults)
    opening: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    print(_HELP)
    for line in _lines():
        if line == "/clear":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
        except InvalidRequestError as error:
            messages.pop()
            print(f"legato: {error}", file=sys.stderr)
    return 0


def _lines() -> Iterator[str]:
    """What the user types, without empty lines."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  gives input() its line editing
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line:
            yield line


def _answer(llm: "LLM", messages: list["Message"], params: SamplingParams) -> str:
    """Print the answer as it comes; returns it, as far as it came."""
    text = ""
    with _interrupts() as interrupted:
        for delta in llm.stream_chat(messages, params):
            text += delta.text
            print(delta.text, end="", flush=True)
            if interrupted.is_set():
                break
    print()
    return text


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Turn Ctrl-C into a flag, so that it never tears a step apart."""
    interrupted = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
