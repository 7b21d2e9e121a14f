"""Servers to measure, one after the other."""

import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

SERVE = f"{sys.executable} -m legato serve --port {{port}} --log-level warning"
_START_TIMEOUT_S = 300.0


@contextmanager
def running_server(command: str) -> Iterator[str]:
    """Run a server until the block ends; yields its base URL once it is healthy.

    Args:
        command: {port} in it is replaced by a free one.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    base_url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        shlex.split(command.replace("{port}", str(port))),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _await_health(process, base_url)
        yield base_url
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
