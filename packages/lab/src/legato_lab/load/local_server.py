"""Runs a server on this machine while it is measured."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

import httpx

from legato.core.errors import ConfigError

SERVE = (sys.executable, "-m", "legato", "serve", "--port", "{port}", "--log-level", "warning")
"""A command for `local_server`, to which flags may be added."""

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.2


@contextmanager
def local_server(
    command: Sequence[str], log: IO[str] | int = subprocess.DEVNULL
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server until the block ends; yields its process and its base URL once it is healthy.

    Args:
        command: {port} in it is replaced by a free port.
        log: receives its standard error.

    Raises:
        ConfigError: it ended, or did not become healthy.
    """
    port = str(_free_port())
    base_url = f"http://127.0.0.1:{port}"
    process = _started([part.replace("{port}", port) for part in command], log)
    try:
        _await_health(process, base_url)
        yield process, base_url
    finally:
        _stop(process)


def _started(command: Sequence[str], log: IO[str] | int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def _await_health(process: subprocess.Popen[bytes], base_url: str) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise ConfigError(
                f"the server ended with status {process.returncode}: {process.args!r}"
            )
        try:
            if httpx.get(f"{base_url}/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(_POLL_S)
    raise ConfigError(f"the server did not become healthy: {process.args!r}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
