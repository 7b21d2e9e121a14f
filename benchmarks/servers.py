"""Servers to measure, one after the other."""

import argparse
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO

from legato.core.config import DEFAULT_MODEL
from legato.lab.load import local_server

Server = tuple[str, str, str]
"""Its name, that of the model it serves, and the command that starts it."""

SERVE = shlex.join(local_server.SERVE)
SERVE_AS_PEERS_DO = f"{SERVE} --kv-cache-memory 4G"
"""As much cache as peers have, taken from the machine at the start, as theirs is."""


def add_peer_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=MODEL=COMMAND",
        help="another server to measure; {port} in the command is replaced",
    )


def servers(legato: Mapping[str, str], peers: Iterable[str]) -> list[Server]:
    """Legato's, by their names, and then the peers that `--peer` told of."""
    own = [(name, DEFAULT_MODEL, command) for name, command in legato.items()]
    return [*own, *(_peer(told) for told in peers)]


def _peer(told: str) -> Server:
    name, model, command = told.split("=", 2)
    return name, model, command


@contextmanager
def running_server(command: str) -> Iterator[str]:
    """Run a server until the block ends; yields its base URL once it is healthy.

    Args:
        command: {port} in it is replaced by a free one.
    """
    with server_process(command) as (_, base_url):
        yield base_url


@contextmanager
def server_process(
    command: str, log: IO[str] | int = subprocess.DEVNULL
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The same, with the process; what it logs goes to `log`."""
    with local_server.local_server(shlex.split(command), log) as server:
        yield server
