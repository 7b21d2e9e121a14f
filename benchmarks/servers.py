"""Servers to measure, one after the other."""

import argparse
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO

import httpx

from legato.core.config import DEFAULT_MODEL

Server = tuple[str, str, str]
"""Its name, that of the model it serves, and the command that starts it."""

SERVE = f"{sys.executable} -m legato serve --port {{port}} --log-level warning"
_START_TIMEOUT_S = 300.0


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
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    base_url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        shlex.split(command.replace("{port}", str(port))),
        stdout=subprocess.DEVNULL,
        stderr=log,
        start_new_session=True,
    )
    try:
        _await_health(process, base_url)
        yield process, base_url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_health(process: subprocess.Popen[bytes], base_url: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}: {process.args}")
        try:
            if httpx.get(f"{base_url}/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the server did not become healthy: {process.args}")
