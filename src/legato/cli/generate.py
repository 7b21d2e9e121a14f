"""`legato generate`: complete prompts once, without a server."""

import argparse
import sys

from legato.cli.flags import (
    add_config_flag,
    add_engine_flags,
    add_sampling_flags,
    engine_config,
    with_sampling_flags,
)
from legato.cli.values import integer


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "generate",
        help="complete prompts",
        description="Complete prompts, all in one batch, and print what comes after each.",
    )
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="texts to go on with (default: read stdin)"
    )
    parser.add_argument(
        "--n", type=integer, default=1, help="completions of each prompt (%(default)s)"
    )
    add_config_flag(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the completions, in the order of the prompts, with a blank line between them."""
    from legato.llm.llm import LLM

    prompts = args.prompts or [sys.stdin.read()]
    llm = LLM.from_config(engine_config(args))
    params = with_sampling_flags(args, llm.get_default_sampling_params())
    generations = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    texts = [output.text for generation in generations for output in generation.outputs]
    print("\n\n".join(texts))
    return 0
