"""Request bodies, raw or parsed strictly, and responses in JSON and events."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from email.message import Message
from functools import cache
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from fastapi import Depends, HTTPException, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from legato.api.http.errors import body_too_large, no_json_object
from legato.api.http.json_text import cut, encode_json, encode_json_into, json_pieces, parse_json
from legato.api.limits import MAX_PLAIN_BODY_BYTES
from legato.core.errors import InvalidRequestError

JSON = "application/json"
_EVENT_BEGIN, EVENT_END = b"data: ", b"\n\n"
DONE = b"data: [DONE]" + EVENT_END
EVENT_STREAM, JSON_LINES = "text/event-stream", "application/x-ndjson"
# Many clients cut events into lines as Python's `splitlines` does: at these characters, too.
_LINE_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029"]
# Proxies must not buffer a live stream.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class JsonRoute(APIRoute):
    """Parses small bodies on the event loop, as strictly as the text processes parse others."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strict_json(request: Request) -> Response:
            strict = _StrictJsonRequest(request.scope, request.receive)
            if len(await strict.body()) > MAX_PLAIN_BODY_BYTES:
                raise body_too_large(MAX_PLAIN_BODY_BYTES)
            return await handle(strict)

        return handle_strict_json


class _StrictJsonRequest(Request):
    async def json(self) -> Any:
        try:
            return parse_json(await self.body())
        except InvalidRequestError as error:  # FastAPI would not report it
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from error


async def _json_bytes(request: Request) -> bytearray:
    """Return a body whose content type is JSON. No web page can send one across origins unasked."""
    content_type = Message()
    content_type["content-type"] = request.headers.get("content-type", "")
    kind, _, subtype = content_type.get_content_type().partition("/")
    # `ReadBody` passes it on whole; `request.body()` would copy it.
    body: bytearray = (await request.receive())["body"]
    if not body or kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise no_json_object()
    return body


async def _bytes_of_any_type(request: Request) -> bytearray:
    body: bytearray = (await request.receive())["body"]
    if not body:
        raise no_json_object()
    return body


AnyJsonBytes = Annotated[bytearray, Depends(_bytes_of_any_type)]
"""A raw body of any content type: curl, in Ollama's examples, says that its JSON is a form.

`CheckOrigin` alone keeps other sites' forms out.
"""
JsonBytes = Annotated[bytearray, Depends(_json_bytes)]
"""The raw body, for handlers that send it to a text process; `takes` describes it."""


def json_response(body: msgspec.Struct | bytes) -> Response:
    """Args: body: a struct to encode, or JSON."""
    data = body if isinstance(body, bytes) else encode_json(body)
    return Response(data, media_type=JSON)


def event(data: bytes) -> bytes:
    """Format JSON as an event. It must not contain CR or LF; strings of JSON escape them."""
    return _EVENT_BEGIN + in_one_line(data) + EVENT_END


def json_event(body: msgspec.Struct) -> bytes:
    """Format the JSON of a struct as an event. It is encoded within the event's own bytes."""
    data = bytearray(_EVENT_BEGIN)
    encode_json_into(body, data, len(data))
    data += EVENT_END
    return in_one_line(bytes(data))


def json_line(body: msgspec.Struct) -> bytes:
    """Format the JSON of a struct as a line of its own."""
    data = bytearray()
    encode_json_into(body, data, 0)
    data += b"\n"
    return in_one_line(bytes(data))


def in_one_line(json: bytes) -> bytes:
    """Escape all line ends of JSON, which has none outside strings. It must not cut a character."""
    if json.isascii():
        return json
    for end, escaped in _LINE_ENDS:
        json = json.replace(end, escaped)
    return json


class TypedEvent(msgspec.Struct, frozen=True, tag_field="type"):
    """An event whose name is its type."""


def typed_event_pieces(
    events: Iterable[TypedEvent], encode: Callable[[TypedEvent], Iterable[bytes]] = json_pieces
) -> Iterator[bytes]:
    """Format events, in pieces.

    Args:
        encode: makes JSON of an event, as for `event`; each piece has whole characters.
    """
    for event in events:
        yield b"event: %b\ndata: " % _name(type(event))
        yield from map(in_one_line, encode(event))
        yield EVENT_END


@cache
def _name(kind: type[TypedEvent]) -> bytes:
    tag = kind.__struct_config__.tag
    assert isinstance(tag, str)
    return tag.encode()


class StreamedResponse(Response):
    """A response whose body is sent piece by piece.

    Unlike Starlette's, it does not watch for disconnects: `CancelOnDisconnect` does.
    """

    def __init__(self, headers: dict[str, str], media_type: str) -> None:
        self.status_code = HTTPStatus.OK
        self.media_type = media_type
        self.background = None
        self.init_headers(headers)

    async def begin(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})

    async def finish(self, send: Send, body: bytes = b"") -> None:
        await send({"type": "http.response.body", "body": body, "more_body": False})


class EventResponse(StreamedResponse):
    """Server-sent events, or lines of JSON."""

    def __init__(self, media_type: str = EVENT_STREAM) -> None:
        super().__init__(_STREAM_HEADERS, media_type)


class EventStream(EventResponse):
    """Sends the events of a generator, and always closes the generator."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await self.begin(send)
            async for body in self._events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await self.finish(send)


class _InPieces(StreamedResponse):
    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__({"Content-Length": str(sum(map(len, pieces)))}, JSON)
        self._pieces = pieces

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await self.begin(send)
        for body in cut(self._pieces):
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await self.finish(send)


def pieces_response(pieces: Sequence[bytes]) -> Response:
    """Send JSON in pieces: one write of megabytes would block all other streams."""
    return _InPieces(pieces)
