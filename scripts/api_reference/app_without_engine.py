"""The HTTP application as far as it gets without an engine: it describes itself."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

from legato.api.app import create_app
from legato.api.config import ServerConfig


def openapi_document() -> dict[str, Any]:
    """Return what the server answers at /openapi.json."""
    absent: Any = None
    lifecycle: Any = SimpleNamespace(is_draining=False, in_flight=nullcontext)
    metrics: Any = SimpleNamespace(count_error=None)
    app = create_app(absent, absent, ServerConfig(), lifecycle, metrics)

    async def app_at_zero(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["received_s"] = 0.0  # which the connection knows
        await app(scope, receive, send)

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app_at_zero)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/openapi.json")

    document: dict[str, Any] = asyncio.run(request()).json()
    return document
