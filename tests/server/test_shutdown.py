"""How a server ends: drained, stopped, or with its engine."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.launch import ServerProcess, long_request, running_server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path) as process:
        yield process


class BackgroundStream:
    """Reads a stream on a thread, from its first token on."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.is_complete = False
        self._server = server
        self._request = long_request(**fields)
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._begun.wait(60)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        with (
            httpx.Client(base_url=self._server.url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json=self._request) as response,
        ):
            for line in response.iter_lines():
                self._begun.set()
                if line == "data: [DONE]":
                    self.is_complete = True
                elif line:
                    self.chunks.append(json.loads(line.removeprefix("data: ")))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_drain(own_server: ServerProcess, number: signal.Signals) -> None:
    """What runs is finished; what comes is refused, with an answer; then the server is gone."""
    engine = own_server.engine
    stream = BackgroundStream(own_server, max_tokens=200)
    own_server.process.send_signal(number)
    while (health := own_server.http.get("/health")).status_code == 200:
        pass
    assert health.status_code == 503
    refused = own_server.http.post("/v1/completions", json={"prompt": "Hi"})
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.json()["error"]["code"] == "shutting_down"
    stream.join()
    assert stream.is_complete
    assert len(stream.chunks) == 200
    assert stream.chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert own_server.process.wait(60) == 0
    assert not engine.is_running()


def test_second_signal_ends_streams_with_an_error(own_server: ServerProcess) -> None:
    engine = own_server.engine
    stream = BackgroundStream(own_server)
    own_server.process.send_signal(signal.SIGTERM)
    while own_server.http.get("/health").status_code == 200:
        pass
    own_server.process.send_signal(signal.SIGTERM)
    stream.join()
    assert stream.is_complete, "the client is told that no more comes"
    assert stream.chunks[-1]["error"]["code"] == "shutting_down"
    assert own_server.process.wait(60) == 1
    assert not engine.is_running()


def test_engine_that_dies_takes_the_server_with_it(own_server: ServerProcess) -> None:
    stream = BackgroundStream(own_server)
    own_server.engine.kill()
    stream.join()
    assert stream.is_complete
    assert stream.chunks[-1]["error"]["code"] == "engine_dead"
    assert own_server.process.wait(60) == 1
    assert "the engine process ended unexpectedly" in own_server.log.read_text()


def test_signal_while_loading(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "legato", "serve", "--port", "0"]
    log = tmp_path / "server.log"
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        children: list[psutil.Process] = []
        while not children:
            children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not any(child.is_running() for child in children)
