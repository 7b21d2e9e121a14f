"""`legato chat`: talk to a model in the terminal, loaded here or served at a URL."""

import argparse
import os
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import msgspec

from legato.cli.command_parser import CommandParser
from legato.cli.conversation import HELP, Answer, AnswerPiece, Message, converse
from legato.cli.flags import (
    add_config_flag,
    add_engine_flags,
    add_model_argument,
    add_sampling_flags,
    brief,
    engine_config,
    given_fields,
    merge_model,
    with_sampling_flags,
)
from legato.cli.values import filled
from legato.core.config import engine_fields
from legato.core.errors import ConfigError
from legato.core.sampling_params import SamplingParams

_EXAMPLES = (
    "legato chat                                the small default model",
    "legato chat ./model.gguf                   a GGUF file, or a folder",
    "legato chat --url http://127.0.0.1:8000    a server that runs",
)
_BRIEF = brief(
    *("--url", "--system", "--max-tokens", "--temperature", "--seed"),
    *("--max-model-len", "--quantization", "--num-threads", "--device"),
)
_KEY_VARIABLE = "LEGATO_API_KEY"


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    parser: CommandParser = subparsers.add_parser(
        "chat",
        add_help=False,
        help="talk to a model in the terminal",
        description=f"Talk to a model in the terminal. {HELP}",
    )
    parser.open_with(_EXAMPLES, _BRIEF)
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told about its role")
    parser.add_argument(
        "--url",
        type=filled,
        metavar="URL",
        help="talk to a server that runs, such as http://127.0.0.1:8000, instead of loading a "
        "model; --model is its name there",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"that the server asks for (default: ${_KEY_VARIABLE})"
    )
    add_config_flag(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read lines and answer them until the input ends."""
    merge_model(args)
    converse(_local(args) if args.url is None else _remote(args), args.system)
    return 0


def _remote(args: argparse.Namespace) -> Answer:
    from legato.cli.remote_chat import RemoteChat

    needless = [f.option for f in engine_fields() if hasattr(args, f.name) and f.name != "model"]
    if needless:
        raise ConfigError(f"{needless[0]} is for a model that is loaded here, not for --url")
    options = given_fields(args, SamplingParams)
    SamplingParams(**options)  # raises before a question is typed
    return RemoteChat(
        args.url,
        api_key=args.api_key or os.environ.get(_KEY_VARIABLE),
        model=getattr(args, "model", None),
        options=options,
    ).answer


def _local(args: argparse.Namespace) -> Answer:
    from legato.llm.llm import LLM

    llm = LLM.from_config(engine_config(args))
    defaults = msgspec.structs.replace(llm.get_default_sampling_params(), max_tokens=None)
    params = with_sampling_flags(args, defaults)

    def answer(messages: list[Message]) -> Generator[AnswerPiece]:
        num_tokens = 0
        with _interrupts() as interrupted:
            for delta in llm.stream_chat(messages, params):
                num_tokens += len(delta.token_ids)
                yield AnswerPiece(delta.text, num_tokens=num_tokens)
                if interrupted.is_set():
                    return

    return answer


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Turn Ctrl-C into a flag, so that it never interrupts a step."""
    interrupted = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
