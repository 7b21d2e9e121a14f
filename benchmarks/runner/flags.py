"""The flags that several benchmarks have, under the same names."""

import argparse
from collections.abc import Sequence
from pathlib import Path

SERVER_FLAGS = "server_flags"


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="FOLDER", help="of what is written"
    )


def add_rounds(
    parser: argparse.ArgumentParser,
    default: int,
    *others: str,
    help: str = "in each of which all sides take their turns",
) -> None:
    """Args: others: names that the flag had before."""
    parser.add_argument(
        "--rounds", *others, type=int, default=default, metavar="N", help=f"{help} (%(default)s)"
    )


def add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random")


def add_seconds(
    parser: argparse.ArgumentParser, default: float, help: str = "in which requests come"
) -> None:
    parser.add_argument(
        "--seconds", type=float, default=default, metavar="S", help=f"{help} (%(default)g)"
    )


def add_promises(parser: argparse.ArgumentParser, itl_slo_s: float, ttft_slo_s: float) -> None:
    """Add `--itl-slo` and `--ttft-slo`, as `legato serve` takes them."""
    from legato.cli.values import duration_s

    for name, default in (("--itl-slo", itl_slo_s), ("--ttft-slo", ttft_slo_s)):
        parser.add_argument(name, type=duration_s, default=default, metavar="DURATION")


def add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=MODEL=COMMAND",
        help="another server to measure; {port} in the command is replaced",
    )


def add_server_flags(parser: argparse.ArgumentParser, default: Sequence[str] = ()) -> None:
    """Pass what the benchmark does not know to `legato serve`; without any, the default."""
    told = f" (default: {' '.join(default)})" if default else ""
    parser.set_defaults(**{SERVER_FLAGS: list(default)})
    parser.epilog = f"Other flags are those of `legato serve`, for Legato's servers{told}."
