"""Puts the HTTP application together."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from legato import __version__
from legato.core.errors import InvalidRequestError
from legato.engine.client import EngineClient
from legato.engine.errors import EngineDeadError, OverloadedError, RequestFailedError
from legato.observe.metrics import Metrics
from legato.server import chat, completions, models, probes, tokenization
from legato.server.config import ServerConfig
from legato.server.context import Context
from legato.server.errors import ApiError, error_response
from legato.server.lifecycle import Lifecycle
from legato.server.middleware import (
    CancelOnDisconnect,
    ReadBody,
    RefuseWhileDraining,
    RequestIds,
    RequireApiKey,
)

_ERRORS = (
    ApiError,
    EngineDeadError,
    HTTPException,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    RequestValidationError,
    Exception,
)


def create_app(client: EngineClient, config: ServerConfig, lifecycle: Lifecycle) -> ASGIApp:
    """The OpenAI-compatible API of one engine."""
    metrics = Metrics(client.info.served_model_name, client)
    api = FastAPI(title="Legato", version=__version__, redirect_slashes=False)
    api.state.context = Context(client, config, metrics, lifecycle)
    for room in (chat, completions, models, tokenization, probes):
        api.include_router(room.router)
    for error in _ERRORS:
        api.add_exception_handler(error, _handle)
    app: ASGIApp = CancelOnDisconnect(api)
    app = ReadBody(app, config.max_body_bytes)
    app = RequireApiKey(app, config.api_keys)
    app = RefuseWhileDraining(app, lifecycle)
    return RequestIds(app, metrics)


async def _handle(_request: Request, error: Exception) -> Response:
    return error_response(error)
