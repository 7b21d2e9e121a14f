"""The flags that describe how to sample, shared by the commands that generate."""

import argparse

import msgspec

from legato.cli.flags import given_fields
from legato.core.sampling_params import SamplingParams


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `with_sampling_flags` reads; one not given leaves no trace."""
    group = parser.add_argument_group("sampling", argument_default=argparse.SUPPRESS)
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P", help="keep this much probability")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K most likely tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="drop what is P times less likely")
    group.add_argument("--seed", type=int, metavar="N", help="makes the result reproducible")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the output here; may be repeated"
    )


def with_sampling_flags(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """The defaults, with the given flags in their place.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    return msgspec.structs.replace(defaults, **given_fields(args, SamplingParams))
