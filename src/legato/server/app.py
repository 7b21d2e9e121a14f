"""Builds the HTTP application."""

from http import HTTPStatus

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from legato.core.errors import InvalidRequestError
from legato.core.version import __version__
from legato.engine.errors import (
    EngineDeadError,
    OverloadedError,
    RequestFailedError,
    SlowReaderError,
)
from legato.engine.frontend.engine import Engine
from legato.observe.metrics.server_metrics import ServerMetrics
from legato.server.anthropic import messages
from legato.server.anthropic.events import MessageAnswer
from legato.server.config import ServerConfig
from legato.server.context import Context, KVEventSource
from legato.server.http.admins import Admins
from legato.server.http.api_keys import ApiKeys
from legato.server.http.error_responses import error_response
from legato.server.http.errors import ApiError
from legato.server.http.middleware import (
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
from legato.server.http.origins import CheckHost, CheckOrigin, HostNames
from legato.server.openai import (
    chat,
    completions,
    embeddings,
    generate,
    models,
    rendering,
    scores,
    tokenization,
)
from legato.server.openai.chat import ChatAnswer
from legato.server.openai.completions import CompletionAnswer
from legato.server.openai.embeddings import EmbeddingAnswer
from legato.server.openai.generate import DerenderedAnswer, TextAnswer, TokensAnswer
from legato.server.openai.models import ModelCard, ModelList
from legato.server.openai.rendering import RenderedPrompt
from legato.server.openai.responses import endpoints as responses
from legato.server.openai.responses.endpoints import DeletedResponse, InputItemList
from legato.server.openai.responses.output import ResponseAnswer
from legato.server.openai.responses.store import ResponseStore
from legato.server.openai.scores import RerankAnswer, ScoreAnswer
from legato.server.openapi import DescribedApi
from legato.server.operations import cache, pages, probes, routers, settings, trace
from legato.server.operations.cache import CacheReset
from legato.server.operations.dashboard import events
from legato.server.operations.probes import Health, Load
from legato.server.operations.routers import ModelInfo, ServerInfo
from legato.server.operations.settings import SettingsAnswer
from legato.server.operations.trace import LiveTrace, TraceStarted
from legato.server.requests.anthropic import CountTokensRequest, MessagesRequest, TokenCount
from legato.server.requests.chat import ChatRequest
from legato.server.requests.completion import CompletionRequest
from legato.server.requests.embeddings import EmbeddingRequest
from legato.server.requests.generate import GenerateRequest
from legato.server.requests.responses import InputTokenCount, ResponsesRequest
from legato.server.requests.scores import RerankRequest, ScoreRequest
from legato.server.requests.tokenization import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from legato.server.text.text_processes import TextProcesses

_ANSWERS = (
    CacheReset,
    ChatAnswer,
    CompletionAnswer,
    DeletedResponse,
    DerenderedAnswer,
    DetokenizeAnswer,
    EmbeddingAnswer,
    Health,
    InputItemList,
    InputTokenCount,
    Load,
    MessageAnswer,
    ModelCard,
    ModelInfo,
    ModelList,
    RenderedPrompt,
    RerankAnswer,
    ResponseAnswer,
    ScoreAnswer,
    ServerInfo,
    SettingsAnswer,
    TextAnswer,
    TokenCount,
    TokenizeAnswer,
    TokensAnswer,
    TraceStarted,
)
_REQUESTS = (
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerateRequest,
    MessagesRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
    TokenizeRequest,
)
_UNROUTED = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
_OPENAPI = "/openapi.json"
_CORS_METHODS = ("GET", "POST", "DELETE")
_CORS_EXPOSED = ("X-Request-Id", "Retry-After", "Warning")
_ROOMS = (
    *(chat, completions, embeddings, scores, responses, messages),
    *(models, tokenization, rendering, generate),
    *(trace, settings, cache, probes, routers, events, pages),
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
        answers=_ANSWERS,
        requests=_REQUESTS,
    )
    api.state.context = Context(
        engine, text, metrics, lifecycle, config.max_unread_tokens, kv_event_source
    )
    api.state.response_store = ResponseStore(
        config.max_stored_responses, config.max_stored_bytes, config.max_body_bytes
    )
    names = HostNames(config)
    api.state.admins = Admins(config, names)
    api.state.live_trace = LiveTrace(engine, config.max_trace_bytes)
    assets = pages.load_dashboard() | pages.load_reference()
    routers = [*(room.router for room in _ROOMS), pages.pages_router(assets)]
    if config.enable_tokenizer_info_endpoint:
        routers.append(tokenization.info_router)
    for router in routers:
        api.include_router(router)
    api.state.endpoints = [route for router in routers for route in router.routes]
    for error in _ERRORS:
        api.add_exception_handler(error, _handle)
    app: ASGIApp = AnswerHead(CancelOnDisconnect(AnswerWarnings(api, metrics)))
    app = RefuseWhileDraining(app, lifecycle)
    app = ReadBody(app, config.max_body_bytes)  # uncounted: draining waits for no body
    # The API reference and the files of pages are not secret.
    open_paths = {*OPEN_PATHS, *assets, pages.ROOT, _OPENAPI}
    app = RequireApiKey(
        app, _all_keys(config), open_paths, shares_cache=tenants_share_cache(config)
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
    return AddVersion(RequestIds(app, metrics))


def tenants_share_cache(config: ServerConfig) -> bool:
    """Return whether tenants find each other's cached prompts; a single tenant has no other."""
    return config.share_cache_between_tenants or ApiKeys(config.api_keys).num_tenants < 2


def _all_keys(config: ServerConfig) -> tuple[str, ...]:
    """All valid keys; empty if the API is open."""
    return (*config.api_keys, *config.admin_api_keys) if config.api_keys else ()


async def _handle(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code in _UNROUTED:
        allowed = allowed_methods(request.scope, request.app.state.endpoints)
        if request.method == "OPTIONS" and allowed:
            return Response(
                status_code=HTTPStatus.NO_CONTENT, headers={"Allow": ", ".join(allowed)}
            )
        error = no_such_endpoint(request.scope, request.app.state.endpoints)
    return error_response(error)
