"""How a server is ended: drained, or stopped."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.api.background import BackgroundStream
from tests.api.launch import ServerProcess, running_server, wait_until
from tests.api.wire import connect, is_closed, read_error


@pytest.fixture
def own_server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """Param: whether it is a fork."""
    with running_server(tmp_path, is_forked=request.param) as process:
        yield process


@pytest.mark.parametrize(
    ("own_server", "number"),
    [(False, signal.SIGTERM), (True, signal.SIGINT)],
    indirect=["own_server"],
)
def test_drain(own_server: ServerProcess, number: signal.Signals) -> None:
    """What runs is finished; what comes is refused, with an answer; then the server is gone."""
    engine = own_server.engine
    stream = BackgroundStream(own_server, max_tokens=200)
    watcher = own_server.http.send(
        own_server.http.build_request("GET", "/dashboard/events"), stream=True
    )
    own_server.process.send_signal(number)
    while (health := own_server.http.get("/health")).status_code == 200:
        pass
    assert health.status_code == 503
    probes = [own_server.http.get(path) for path in ("/livez", "/startupz", "/readyz")]
    assert [probe.status_code for probe in probes] == [200, 200, 503]
    refused = own_server.http.post("/v1/completions", json={"prompt": "Hi"})
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.json()["error"]["code"] == "shutting_down"
    watcher.read()  # to its end: the server does not wait for watchers
    stream.join()
    assert stream.is_complete
    assert len(stream.chunks) == 200
    assert stream.chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert own_server.process.wait(60) == 0
    assert not engine.is_running()
    assert "requests still run; another Ctrl-C, or SIGTERM, ends them" in own_server.log.read_text()


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 9999\r\n\r\n{",
        "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        "Content-Length: 9\r\nExpect: 100-continue\r\n\r\n",
    ],
)
def test_a_body_that_is_still_coming_is_not_waited_for(tmp_path: Path, head: str) -> None:
    with running_server(tmp_path) as own_server, connect(own_server) as sock:
        kind = "Content-Type: application/json\r\n"
        sock.sendall(f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n{kind}{head}".encode())
        if "Expect" in head:
            assert sock.recv(2**16).startswith(b"HTTP/1.1 100 ")
        own_server.http.get("/health")  # once the head has been read
        own_server.process.send_signal(signal.SIGTERM)
        assert read_error(sock) == (503, "shutting_down")
        assert is_closed(sock)
        assert own_server.process.wait(60) == 0
        assert "Traceback" not in own_server.log.read_text()


def test_a_bound_on_draining(tmp_path: Path) -> None:
    with running_server(tmp_path, "--timeout-drain", "500ms") as own_server:
        stream = BackgroundStream(own_server)
        own_server.process.send_signal(signal.SIGINT)
        stream.join()
        assert stream.is_complete
        assert stream.chunks[-1]["error"]["code"] == "shutting_down"
        assert own_server.process.wait(60) == 1
        log = own_server.log.read_text()
    assert "1 requests still run, for 500ms at most; another Ctrl-C" in log
    assert "stopping: 1 requests end here" in log


def test_second_signal_ends_streams_with_an_error(tmp_path: Path) -> None:
    with running_server(tmp_path) as own_server:
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


def test_a_closed_terminal_drains(tmp_path: Path) -> None:
    """Though more than one tells the server of it, and what it writes there is lost."""
    terminal, servers_side = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(servers_side, termios.TIOCSCTTY, 0)
        os.dup2(servers_side, 2)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where nohup runs tests

    with running_server(tmp_path, before=take_terminal) as own_server:
        os.close(servers_side)
        stream = BackgroundStream(own_server, max_tokens=100)
        os.close(terminal)
        while own_server.http.get("/health").status_code == 200:
            pass
        os.killpg(own_server.process.pid, signal.SIGHUP)
        stream.join()
        assert stream.is_complete
        assert len(stream.chunks) == 100
        assert own_server.process.wait(60) == 0


def test_signals_that_end_nothing(tmp_path: Path) -> None:
    """A hangup that `nohup` has the server ignore, and what reaches an engine but is not for it."""

    def ignore_hangup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with running_server(tmp_path, before=ignore_hangup) as own_server:
        engine = own_server.engine
        stream = BackgroundStream(own_server, max_tokens=50)
        own_server.process.send_signal(signal.SIGHUP)
        signal_all(engine)
        stream.join()
        assert stream.is_complete
        assert own_server.http.get("/health").status_code == 200
        assert own_server.engine == engine
        server = psutil.Process(own_server.process.pid)
        known = set(server.children())
        engine.kill()
        while not (begun := set(server.children()) - known):
            pass
        (engine,) = begun  # which has just begun to load
        signal_all(engine)
        wait_until(lambda: own_server.http.get("/health").status_code == 200, "no engine")
        assert own_server.engine == engine


def signal_all(process: psutil.Process) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)


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
