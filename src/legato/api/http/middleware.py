"""ASGI middleware around every request; it neither buffers streams nor hides disconnects.

Each class wraps an application and is one itself; `create_app` sets their order.
"""

import asyncio
import re
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato.api.http.access import ApiKeys, sent_key
from legato.api.http.error_responses import error_response
from legato.api.http.errors import (
    ApiError,
    body_too_large,
    invalid_key,
    invalid_request,
    shutting_down,
    too_many_bodies,
)
from legato.core import logs
from legato.core.spelling import did_you_mean
from legato.observe.metrics.server_metrics import ServerMetrics

REQUEST_ID = "X-Request-Id"
_APIS = {"/v1/messages/": "anthropic", "/api/": "ollama"}
"""Key the beginning of a path with a slash added, value the API; others are OpenAI's."""
_ANTHROPIC_REQUEST_ID = "request-id"
# The id is repeated in every chunk of a stream.
_GOOD_ID = re.compile(r"[!-~]{1,128}")
_PROBES = ("/livez", "/readyz", "/startupz", "/health", "/ping")
OPEN_PATHS = frozenset({*_PROBES, "/metrics", "/version"})
WATCH_PATH = "/dashboard/events"
"""Its clients only watch, so draining does not wait for them."""
_FIRST_ERROR_STATUS = 400
# A body over the limit is still read, up to this many times the limit: a client that is still
# sending would not see the answer.
_READ_ON = 8
# All bodies being received may take this many times the limit of one. Above that, bodies larger
# than `_SMALL_BODY_BYTES` are refused.
_MAX_BODIES = 16
_SMALL_BODY_BYTES = 64 * 2**10

_GZIP = zlib.MAX_WBITS | 16

_MISCELLANEOUS = 299
"""The warn-code of RFC 7234 for a lasting warning of any kind."""
_MAX_WARNING_CHARS = 1000

_FOREIGN_PATHS = {
    "(api/|v1/)?(is-?)?ready(ness|iness)?(/probe)?": ("/readyz", "/health"),
    "(api/|v1/)?(a?live|liveness|livez)(/probe)?": ("/livez", "/health"),
    "startup|started|startupz": ("/startupz", "/health"),
    "(api/|v1/|api/v1/)?(health|healthz|healthy|health-?check|status|up|heartbeat|readyz)": (
        "/health",
    ),
    "stats|statistics|prometheus|(v1|api)/metrics": ("/metrics",),
    "ui|chat|web|webui|index.html?|playground": ("/",),
    "swagger(-ui)?|redoc|api-docs": ("/docs",),
    "completion|generate|generate_stream|infill|(v1/)?engines/.*/completions": ("/v1/completions",),
    "v1/chat|api/v1/chat/completions|openai/v1/chat/completions": ("/v1/chat/completions",),
    "(v1/)?embedding|embed": ("/v1/embeddings",),
}
"""Key a pattern of paths of other servers, value what is meant here, as far as it is served."""

_VERSIONED = ("/chat/completions", "/completions", "/messages", "/models", "/responses")
_VERSION = "/v1"


class RequestIds:
    """Gives each request an id, returns it in the answer, and counts error answers.

    A client's id is kept if it is 1 to 128 visible ASCII characters. Handlers find it in
    `scope["state"]["request_id"]`. `scope["state"]["answer_id"]` is an id that no client can
    choose; both are the same if the client sent none. `scope["state"]["api"]` is the API that the
    path belongs to: "openai", "anthropic" or "ollama".

    Args:
        count_error: called with the status of each error answer.
    """

    def __init__(self, app: ASGIApp, count_error: Callable[[int], None]) -> None:
        self._app = app
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID, "")
        answer_id = uuid.uuid4().hex
        request_id = given if _GOOD_ID.fullmatch(given) else answer_id
        path = f"{scope['path']}/"
        api = next((api for start, api in _APIS.items() if path.startswith(start)), "openai")
        logs.request_id.set(request_id)
        scope.setdefault("state", {}).update(request_id=request_id, answer_id=answer_id, api=api)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if api == "anthropic":
                    headers[_ANTHROPIC_REQUEST_ID] = request_id
                if message["status"] >= _FIRST_ERROR_STATUS:
                    self._count_error(message["status"])
            await send(message)

        await self._app(scope, receive, send_with_id)


class Lifecycle:
    """Whether the server serves, drains or is drained.

    Attributes:
        started_s: when it began to serve, on the clock of `time.monotonic`.
        is_draining: new requests are refused while running ones finish.
        num_in_flight: requests being answered.
    """

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.is_draining = False
        self.num_in_flight = 0

    @property
    def is_drained(self) -> bool:
        return self.is_draining and self.num_in_flight == 0

    def drain(self) -> None:
        self.is_draining = True

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a request while it is being answered."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1


class RefuseWhileDraining:
    """Refuses new requests while the server drains, and counts those in flight."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._lifecycle.is_draining and scope["path"] not in OPEN_PATHS:
            await error_response(shutting_down())(scope, receive, send)
            return
        if scope["path"] == WATCH_PATH:
            await self._app(scope, receive, send)
            return
        with self._lifecycle.in_flight():
            await self._app(scope, receive, send)


class RequireApiKey:
    """Refuses requests without a valid key, if there are keys, except on open paths.

    Handlers find the key's tenant, if it names one, in `scope["state"]["tenant"]`, and in
    "cache_owner" there if tenants share no cached blocks.

    Args:
        shares_cache: whether tenants share cached blocks.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: tuple[str, ...],
        open_paths: Collection[str],
        *,
        shares_cache: bool = True,
    ) -> None:
        self._app = app
        self._shares_cache = shares_cache
        self._open_paths = open_paths
        self._keys = ApiKeys(api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["path"] not in self._open_paths:
            is_known, tenant = self._keys.find(sent_key(Headers(scope=scope)))
            if not is_known:
                await error_response(invalid_key())(scope, receive, send)
                return
            owner = None if self._shares_cache else tenant
            scope.setdefault("state", {}).update(tenant=tenant, cache_owner=owner)
        await self._app(scope, receive, send)


class ReadBody:
    """Reads the whole body before the application runs; refuses one that is too large.

    A body in gzip is decompressed, and is no larger after that.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._num_held_bytes = 0  # of all incomplete bodies
        self._decompressing = asyncio.Lock()  # one at a time, for the memory that it takes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._check_length(headers)
            is_gzip = is_compressed(headers)
            body = await self._read(receive)
            if body and is_gzip:
                async with self._decompressing:
                    body = await asyncio.to_thread(decompressed, body, self._max_body_bytes)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        if body is None:
            return
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body_first() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(scope, receive_body_first, send)

    def _check_length(self, headers: Headers) -> None:
        """Raise `ApiError` for a body too long to skip."""
        if int(headers.get("Content-Length", 0)) > _READ_ON * self._max_body_bytes:
            raise body_too_large(self._max_body_bytes)

    async def _read(self, receive: Receive) -> bytearray | None:
        """Return the body; None if the client disconnects before its end.

        Raises:
            ApiError: it is too large, or other bodies take all the room.
        """
        body = bytearray()
        num_bytes = 0
        try:
            while num_bytes <= _READ_ON * self._max_body_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                num_bytes += len(message["body"])
                if num_bytes <= self._max_body_bytes:
                    body += message["body"]
                    self._num_held_bytes += len(message["body"])
                is_full = self._num_held_bytes > _MAX_BODIES * self._max_body_bytes
                if is_full and len(body) > _SMALL_BODY_BYTES:
                    raise too_many_bodies()
                if not message["more_body"]:
                    break
        finally:
            self._num_held_bytes -= len(body)
        if num_bytes > self._max_body_bytes:
            raise body_too_large(self._max_body_bytes)
        return body  # no copy: copying megabytes blocks the event loop for milliseconds


class AnswerHead:
    """Answers HEAD as GET, but for the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        is_answered = False

        async def send_head(message: Message) -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, send_head)


class CancelOnDisconnect:
    """Cancels the application when the client disconnects, streaming or not.

    It needs the body in one message, as `ReadBody` passes it on. The `finally` clauses of the
    cancelled handler abort its requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = [await receive()]
        handling = asyncio.current_task()
        assert handling is not None
        watching = asyncio.create_task(_cancel_on_disconnect(receive, handling))

        async def receive_body_only() -> Message:
            return body.pop() if body else await asyncio.get_running_loop().create_future()

        async def send_and_stop_watching(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                # The server reports the end of a response as a disconnect, too.
                watching.cancel()

        try:
            await self._app(scope, receive_body_only, send_and_stop_watching)
        except asyncio.CancelledError:
            is_gone = watching.done() and not watching.cancelled()
            if not is_gone:
                raise
        finally:
            watching.cancel()


async def _cancel_on_disconnect(receive: Receive, handling: "asyncio.Task[None]") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    handling.cancel()


def is_compressed(headers: Headers) -> bool:
    """Whether a body is in gzip; raises `ApiError` if it is in another encoding."""
    encoding = headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("gzip", "x-gzip", "identity"):
        raise invalid_request(
            "a body may be compressed with gzip only",
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            {"Accept-Encoding": "gzip"},
        )
    return encoding != "identity"


def decompressed(body: bytearray, max_body_bytes: int) -> bytearray:
    """Decompress a body.

    Raises:
        ApiError: it is not gzip, or larger than `max_body_bytes` after that.
    """
    reader = zlib.decompressobj(_GZIP)
    try:
        data = bytearray(reader.decompress(body, max_body_bytes + 1))
    except zlib.error as error:
        raise invalid_request(f"the body is not gzip: {error}") from error
    if len(data) > max_body_bytes:
        raise body_too_large(max_body_bytes)
    if not reader.eof or reader.unused_data:
        raise invalid_request("the body is not gzip: it ends too early or too late")
    return data


class AnswerWarnings:
    """Puts the warnings about a request into its answer's header, and counts such answers.

    Handlers add to the list `scope["state"]["warnings"]` before the answer begins.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        warnings: list[str] = []
        scope.setdefault("state", {})["warnings"] = warnings

        async def send_with_warnings(message: Message) -> None:
            if warnings and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Warning"] = warning_header(warnings)
                self._metrics.requests.warnings.inc()
            await send(message)

        await self._app(scope, receive, send_with_warnings)


def warning_header(warnings: Sequence[str]) -> str:
    """Return the header's value. Warnings may quote the client: only visible ASCII is kept."""
    text = "; ".join(warnings)[:_MAX_WARNING_CHARS]
    visible = "".join(char if " " <= char <= "~" else "?" for char in text)
    escaped = visible.replace("\\", "\\\\").replace('"', '\\"')
    return f'{_MISCELLANEOUS} legato "{escaped}"'


class AddVersion:
    """Takes paths without `/v1` for the same with it, as llama.cpp does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if any(path == one or path.startswith(f"{one}/") for one in _VERSIONED):
            scope["path"] = _VERSION + path
        await self._app(scope, receive, send)


def allowed_methods(scope: Scope, routes: Iterable[BaseRoute]) -> list[str]:
    """Return the methods that a request's path takes, in order; empty if it is no endpoint."""
    taking = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
    methods = {one for route in taking if isinstance(route, Route) for one in route.methods or ()}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))  # by `AnswerHead`


def no_such_endpoint(scope: Scope, routes: Iterable[BaseRoute]) -> ApiError:
    """Args: scope: of a request that no route takes."""
    method, path = scope["method"], scope["path"]
    known = [route for route in routes if isinstance(route, Route)]
    if allowed := allowed_methods(scope, known):
        told = ", ".join(allowed)
        message = f"{path} does not take {method}, but {told}"
        return invalid_request(message, HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": told})
    served = {route.path for route in known if route.include_in_schema or route.path == "/"}
    meant = [
        one
        for pattern, paths in _FOREIGN_PATHS.items()
        if re.fullmatch(pattern, path.strip("/"))
        for one in paths
        if one in served
    ]
    told = f"; did you mean {' or '.join(meant)}?" if meant else did_you_mean(path, served)
    return invalid_request(f"no such endpoint: {method} {path}{told}", HTTPStatus.NOT_FOUND)
