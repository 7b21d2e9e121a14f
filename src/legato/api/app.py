"""Builds the HTTP application."""

from http import HTTPStatus

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from legato.api import rendering
from legato.api.anthropic import message_answer
from legato.api.config import ServerConfig
from legato.api.context import ApiContext, KVEventSource
from legato.api.http.access import Admins, ApiKeys, CheckHost, CheckOrigin, HostNames
from legato.api.http.error_responses import error_response
from legato.api.http.errors import ApiError
from legato.api.http.middleware import (
    OPEN_PATHS,
    AddVersion,
    AnswerHead,
    AnswerWarnings,
    CancelOnDisconnect,
    Lifecycle,
    ReadBody,
    RefuseWhileDraining,
    RequestIds,
    RequireApiKey,
    allowed_methods,
    no_such_endpoint,
)
from legato.api.ollama import ollama_answer
from legato.api.openai import (
    chat_answer,
    completion_answer,
    embedding_answer,
    generate_answer,
    models,
    score_answer,
    tokenization_answer,
)
from legato.api.openapi import DescribedApi
from legato.api.operations import cache, llama_server, pages, probes, routers, settings, trace
from legato.api.operations.dashboard import events
from legato.api.operations.trace import LiveTrace
from legato.api.readers.reader_pool import TextProcesses
from legato.api.responses import response_endpoints
from legato.api.responses.store import ResponseStore
from legato.core.errors import InvalidRequestError
from legato.core.version import __version__
from legato.engine.client.engine import Engine
from legato.engine.errors import (
    EngineDeadError,
    OverloadedError,
    RequestFailedError,
    SlowReaderError,
)
from legato.observe.metrics.server_metrics import ServerMetrics

_UNROUTED = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
_OPENAPI = "/openapi.json"
_CORS_METHODS = ("GET", "POST", "DELETE")
_CORS_EXPOSED = ("X-Request-Id", "Retry-After", "Warning")
_ROOMS = (
    *(chat_answer, completion_answer, embedding_answer, score_answer),
    *(response_endpoints, message_answer, ollama_answer),
    *(models, tokenization_answer, rendering, generate_answer),
    *(trace, settings, cache, probes, routers, llama_server, events),
)
_ERRORS = (
    ApiError,
    EngineDeadError,
    HTTPException,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    RequestValidationError,
    SlowReaderError,
    Exception,
)


def create_app(
    engine: Engine,
    text: TextProcesses,
    config: ServerConfig,
    lifecycle: Lifecycle,
    metrics: ServerMetrics,
    kv_event_source: KVEventSource | None = None,
) -> ASGIApp:
    """Build the OpenAI-compatible API of one engine."""
    api = DescribedApi(
        title="Legato",
        version=__version__,
        redirect_slashes=False,
        openapi_url=_OPENAPI,
        docs_url=None,
        redoc_url=None,
        asks_for_key=bool(config.api_keys),
    )
    api.state.context = ApiContext(
        engine,
        text,
        metrics,
        lifecycle,
        config.max_unread_tokens,
        kv_event_source,
        config.llama_timings,
    )
    api.state.response_store = ResponseStore(
        config.max_stored_responses, config.max_stored_bytes, config.max_body_bytes
    )
    names = HostNames(config)
    api.state.ollama_version = config.ollama_version
    api.state.admins = Admins(config, names)
    api.state.live_trace = LiveTrace(engine, config.max_trace_bytes)
    assets = pages.load_chat() | pages.load_dashboard() | pages.load_reference()
    routers = [*(room.router for room in _ROOMS), pages.pages_router(assets)]
    if config.enable_tokenizer_info_endpoint:
        routers.append(tokenization_answer.info_router)
    for router in routers:
        api.include_router(router)
    api.state.endpoints = [route for router in routers for route in router.routes]
    for error in _ERRORS:
        api.add_exception_handler(error, _handle)
    app: ASGIApp = AnswerHead(CancelOnDisconnect(AnswerWarnings(api, metrics)))
    app = RefuseWhileDraining(app, lifecycle)
    app = ReadBody(app, config.max_body_bytes)  # uncounted: draining waits for no body
    # The API reference and the files of pages are not secret.
    open_paths = {*OPEN_PATHS, *assets, _OPENAPI}
    app = RequireApiKey(
        app,
        (*config.api_keys, *config.admin_api_keys) if config.api_keys else (),
        open_paths,
        shares_cache=tenants_share_cache(config),
    )
    app = CheckOrigin(app, config.allowed_origins)
    app = CheckHost(app, names)
    if config.allowed_origins:
        # Outside the key check: a browser's preflight request carries no key.
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=_CORS_METHODS,
            allow_headers=("*",),
            expose_headers=_CORS_EXPOSED,
        )
    return AddVersion(RequestIds(app, metrics.count_error))


def tenants_share_cache(config: ServerConfig) -> bool:
    """Return whether tenants find each other's cached prompts; a single tenant has no other."""
    return config.share_cache_between_tenants or ApiKeys(config.api_keys).num_tenants < 2


async def _handle(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code in _UNROUTED:
        allowed = allowed_methods(request.scope, request.app.state.endpoints)
        if request.method == "OPTIONS" and allowed:
            return Response(
                status_code=HTTPStatus.NO_CONTENT, headers={"Allow": ", ".join(allowed)}
            )
        error = no_such_endpoint(request.scope, request.app.state.endpoints)
    return error_response(error)
