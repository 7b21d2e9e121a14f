"""The three probes and the refusal of all else while the model loads, or is downloaded."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import psutil
import pytest

from legato.api.config import ServerConfig
from legato.api.download import download
from legato.api.http_server import ListeningServer
from legato.api.run import _started
from legato.core.config import ModelConfig
from legato.core.errors import ConfigError
from legato.engine.client.engine import Engine
from tests.api.launch import ServerProcess, wait_until


@contextlib.asynccontextmanager
async def loading(parts_s: dict[str, float]) -> AsyncIterator[tuple[ListeningServer, str]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = ListeningServer(ServerConfig(), listener, parts_s)
        yield server, f"http://127.0.0.1:{listener.getsockname()[1]}"
        await server.stop()


async def test_a_server_that_loads_answers_its_probes_and_refuses_all_else() -> None:
    parts_s: dict[str, float] = {}
    async with loading(parts_s) as (_, url), httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/livez")).json() == {"status": "ok"}
        before = await http.get("/startupz")
        assert before.status_code == 503
        assert before.json().keys() == {"status", "elapsed_s"}
        parts_s["weights"] = 2.5
        told = (await http.get("/startupz")).json()
        assert told["status"] == "loading"
        assert told["parts_s"] == {"weights": 2.5}
        assert told["elapsed_s"] >= before.json()["elapsed_s"]
        for method, path in (
            *(("GET", path) for path in ("/readyz", "/health", "/ping", "/metrics", "/nowhere")),
            *(("POST", path) for path in ("/v1/chat/completions", "/completions")),
        ):
            refused = await http.request(method, path, content=b"x" * 2**20)
            assert refused.status_code == 503, path
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.headers["X-Request-Id"]
            assert refused.json()["error"]["code"] == "loading"
        anthropic = (await http.post("/v1/messages", content=b"{}")).json()
        assert anthropic["type"] == "error"
        assert (await http.head("/readyz")).content == b""


async def test_a_server_that_is_stopped_while_it_loads_listens_no_more() -> None:
    async with loading({}) as (server, url), httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/livez")).status_code == 200
        await server.stop()
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient() as other:
                await other.get(f"{url}/livez")


async def test_of_two_sockets_that_are_bound_at_once_the_later_is_refused() -> None:
    with socket.socket() as first, socket.socket() as later:
        for one in (first, later):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        later.bind(first.getsockname())
        server = ListeningServer(ServerConfig(), first, {})
        with pytest.raises(ConfigError, match="Address already in use"):
            ListeningServer(ServerConfig(), later, {})
        await server.stop()


async def test_an_engine_is_not_loaded_for_a_server_that_cannot_listen() -> None:
    begun, is_ended = asyncio.Event(), False

    async def start() -> Engine:
        nonlocal is_ended
        begun.set()
        try:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        finally:
            is_ended = True

    async def listen() -> None:
        await begun.wait()
        raise ConfigError("taken")

    with pytest.raises(ConfigError, match="taken"):
        await _started(start(), asyncio.create_task(listen()))
    assert is_ended


class Hub(ThreadingHTTPServer):
    """Knows no model, and says so when it may."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _HubRequest)
        self.is_asked, self.may_answer = threading.Event(), threading.Event()


class _HubRequest(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.is_asked.set()
        self.server.may_answer.wait(60)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        del args


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield hub
        hub.may_answer.set()
        hub.shutdown()


def test_a_server_that_downloads_answers_its_probes_and_can_be_ended(hub: Hub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = (sys.executable, "-m", "legato", "serve", "nobody/nothing", "--port", port)
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
        contextlib.ExitStack() as ending,
    ):
        ending.callback(server.kill)
        assert hub.is_asked.wait(60)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            wait_until(lambda: _answers(http), "no answer")
            told = http.get("/startupz")
            assert (told.status_code, told.json()["status"]) == (503, "loading")
            assert http.get("/readyz").status_code == 503
        [child] = psutil.Process(server.pid).children()
        server.terminate()
        _, log = server.communicate(timeout=60)
    assert server.returncode == 0
    assert "stopped while loading" in log
    assert not child.is_running()


def _answers(http: httpx.Client) -> bool:
    with contextlib.suppress(httpx.ConnectError):
        return http.get("/livez").status_code == 200
    return False


async def test_what_the_hub_refuses_is_told(hub: Hub) -> None:
    hub.may_answer.set()
    with pytest.raises(ConfigError, match="no such model on the hub"):
        await download(ModelConfig(model="nobody/nothing"))


def test_the_probes_of_a_server_that_serves(server: ServerProcess) -> None:
    assert server.http.get("/livez").json() == {"status": "ok"}
    told = server.http.get("/startupz")
    assert told.status_code == 200
    assert told.json()["status"] == "started"
    assert {"imports", "weights", "calibration"} <= told.json()["parts_s"].keys()
    assert server.http.get("/readyz").json() == server.http.get("/health").json()
