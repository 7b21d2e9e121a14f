"""Watches a server from a process of its own: how long /health takes, and how long a stream rests.

`python -m tests.api.prober URL` answers each line on its standard input with the worst of both
since the last one, in seconds.
"""

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from tests.api.launch import ServerProcess, long_request

_PAUSE_S = 0.002
_PATIENCE_S = 60.0


class Prober:
    """Attributes: process: the one that watches."""

    def __init__(self, server: ServerProcess) -> None:
        command = [sys.executable, "-m", "tests.api.prober", server.url]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.worst_s()  # both have begun

    def worst_s(self) -> tuple[float, float]:
        """Of /health and of the stream, since this was last called."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        told = self.process.stdout.readline().split()
        assert told, "it has stopped watching"
        health_s, stream_s = map(float, told)
        return health_s, stream_s


@contextlib.contextmanager
def probing(server: ServerProcess) -> Iterator[Prober]:
    prober = Prober(server)
    try:
        yield prober
    finally:
        prober.process.kill()
        prober.process.communicate()


class _Worst:
    def __init__(self) -> None:
        self.begun = threading.Event()
        self._worst_s = 0.0
        self._lock = threading.Lock()

    def note(self, seconds: float) -> None:
        self.begun.set()
        with self._lock:
            self._worst_s = max(self._worst_s, seconds)

    def take(self) -> float:
        assert self.begun.wait(_PATIENCE_S), "there is nothing to watch"
        with self._lock:
            worst_s, self._worst_s = self._worst_s, 0.0
        return worst_s


def _ask_health(address: str, worst: _Worst) -> None:
    connection = http.client.HTTPConnection(address)
    while True:
        asked_s = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        worst.note(time.monotonic() - asked_s)
        time.sleep(_PAUSE_S)


def _read_streams(address: str, worst: _Worst) -> None:
    while True:
        connection = http.client.HTTPConnection(address)
        body = json.dumps(long_request(max_tokens=8000))
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        came_s = time.monotonic() if response.readline() else 0.0
        while response.readline():
            now_s = time.monotonic()
            worst.note(now_s - came_s)
            came_s = now_s


def main(url: str) -> None:
    address = urlsplit(url).netloc
    watched = []
    for watch in (_ask_health, _read_streams):
        watched.append(_Worst())
        threading.Thread(target=watch, args=(address, watched[-1]), daemon=True).start()
    for _ in sys.stdin:
        print(*(worst.take() for worst in watched), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
