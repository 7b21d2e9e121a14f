"""Servers to measure."""

import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, NamedTuple

from legato.core.config import DEFAULT_MODEL
from legato_lab.load import local_server

SERVE = shlex.join(local_server.SERVE)
SERVE_AS_PEERS_DO = f"{SERVE} --kv-cache-memory 4G"
"""As much cache as peers have, taken from the machine at the start, as theirs is."""


class Server(NamedTuple):
    """Attributes: model: its name there; command: that starts it."""

    name: str
    model: str
    command: str


def servers(
    legato: Mapping[str, str], peers: Iterable[str], flags: Sequence[str] = ()
) -> list[Server]:
    """Legato's, by their names, and then the peers of `--peer`.

    Args:
        flags: more of them for each of Legato's.
    """
    own = [
        Server(name, DEFAULT_MODEL, with_flags(command, flags)) for name, command in legato.items()
    ]
    return [*own, *(Server(*told.split("=", 2)) for told in peers)]


def with_flags(command: str, flags: Sequence[str]) -> str:
    """A command with more flags."""
    return f"{command} {shlex.join(flags)}".rstrip()


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
