"""The HTTP application as far as it gets without an engine: it describes itself, and refuses."""

import asyncio
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from legato.server.app import create_app
from legato.server.config import ServerConfig


def ask(method: str, path: str, body: object = None) -> httpx.Response:
    """The answer to one request."""

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(request())


@cache
def _app() -> ASGIApp:
    no_engine: Any = None
    lifecycle: Any = SimpleNamespace(is_draining=False, in_flight=nullcontext)
    metrics: Any = SimpleNamespace(count_error=lambda _status: None)
    app = create_app(no_engine, ServerConfig(), lifecycle, metrics)

    async def app_at_zero(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["received_s"] = 0.0  # which the connection knows
        await app(scope, receive, send)

    return app_at_zero
