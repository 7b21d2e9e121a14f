"""The HTTP application as far as it gets without an engine: it describes itself, and refuses."""

import asyncio
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from legato.api.app import create_app
from legato.api.arrival import Arrival
from legato.api.bodies.body_model import Kind, Serving
from legato.api.config import ServerConfig
from legato.api.reading.request_reader import RequestReader
from legato.checkpoint.defaults import ModelDefaults


def ask(method: str, path: str, body: object = None) -> httpx.Response:
    """The answer to one request."""

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(request())


class _TextInThisProcess:
    """Reads what is to be refused, for which it needs neither tokenizer nor model."""

    def __init__(self) -> None:
        info: Any = SimpleNamespace(max_model_len=1, vocab_size=1, hidden_size=1)
        serving = Serving(
            info=info,
            max_completions=1,
            trust_request_chat_template=False,
            message_special_tokens="text",
            unknown_fields="refuse",
        )
        no_tokenizer: Any = SimpleNamespace(max_token_chars=1)
        self._reader = RequestReader(
            no_tokenizer, ModelDefaults(eos_token_ids=(), sampling={}), serving
        )

    async def read(self, kind: Kind, body: bytearray, arrival: Arrival) -> None:  # noqa: ARG002
        list(self._reader.read(kind, bytes(body)))

    answer = job = read


@cache
def _app() -> ASGIApp:
    no_engine: Any = None
    text: Any = _TextInThisProcess()
    lifecycle: Any = SimpleNamespace(is_draining=False, in_flight=nullcontext)
    metrics: Any = SimpleNamespace(count_error=lambda _status: None)
    app = create_app(no_engine, text, ServerConfig(), lifecycle, metrics)

    async def app_at_zero(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["received_s"] = 0.0  # which the connection knows
        await app(scope, receive, send)

    return app_at_zero
