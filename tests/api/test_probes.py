"""The three probes and the refusal of all else while the model loads."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import httpx
import pytest

from legato.api.config import ServerConfig
from legato.api.http_server import ListeningServer
from legato.api.run import _started
from legato.core.errors import ConfigError
from legato.engine.client.engine import Engine
from tests.api.launch import ServerProcess


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


def test_the_probes_of_a_server_that_serves(server: ServerProcess) -> None:
    assert server.http.get("/livez").json() == {"status": "ok"}
    told = server.http.get("/startupz")
    assert told.status_code == 200
    assert told.json()["status"] == "started"
    assert {"imports", "weights", "calibration"} <= told.json()["parts_s"].keys()
    assert server.http.get("/readyz").json() == server.http.get("/health").json()
