"""Bodies: JSON in, as it came or read strictly; JSON and events out."""

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

from legato.core.errors import InvalidRequestError
from legato.server.http.errors import body_too_large, no_json_object
from legato.server.http.json_body import parse_json
from legato.server.http.json_pieces import encode_json, json_pieces
from legato.server.limits import MAX_PLAIN_BODY_BYTES

JSON = "application/json"
DONE = b"data: [DONE]\n\n"
# Proxies must not collect what is read live.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class JsonRoute(APIRoute):
    """Reads small bodies on the event loop, as strictly as others are read in their processes."""

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
        except InvalidRequestError as error:  # of which FastAPI would not tell
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from error


async def _json_bytes(request: Request) -> bytearray:
    """A body that is said to be JSON, which no web page can send to another origin unasked."""
    content_type = Message()
    content_type["content-type"] = request.headers.get("content-type", "")
    kind, _, subtype = content_type.get_content_type().partition("/")
    # `ReadBody` hands it on whole; `request.body()` would make a copy.
    body: bytearray = (await request.receive())["body"]
    if not body or kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise no_json_object()
    return body


JsonBytes = Annotated[bytearray, Depends(_json_bytes)]
"""The body, for a handler that has it read elsewhere; `takes` describes it."""


def json_response(body: msgspec.Struct | bytes) -> Response:
    """Args: body: what is to become JSON, or is it already."""
    data = body if isinstance(body, bytes) else encode_json(body)
    return Response(data, media_type=JSON)


def event(data: bytes) -> bytes:
    """`data` as an event; it must not contain line breaks, which JSON escapes."""
    return b"data: " + data + b"\n\n"


class TypedEvent(msgspec.Struct, frozen=True, tag_field="type"):
    """For clients that tell events by their types, which are their names, too."""


def typed_event_pieces(
    events: Iterable[TypedEvent], encode: Callable[[TypedEvent], Iterable[bytes]] = json_pieces
) -> Iterator[bytes]:
    """As a client reads them, in pieces.

    Args:
        encode: makes JSON of an event, without line breaks.
    """
    for event in events:
        yield b"event: %b\ndata: " % _name(type(event))
        yield from encode(event)
        yield b"\n\n"


@cache
def _name(kind: type[TypedEvent]) -> bytes:
    tag = kind.__struct_config__.tag
    assert isinstance(tag, str)
    return tag.encode()


class StreamedResponse(Response):
    """An answer whose body comes piece by piece, after its beginning.

    It does not look for disconnects, as Starlette's would: `CancelOnDisconnect` does.
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
    """Server-sent events."""

    def __init__(self) -> None:
        super().__init__(_STREAM_HEADERS, "text/event-stream")


class EventStream(EventResponse):
    """Events of a generator, which is closed however the stream ends."""

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
        for body in self._pieces:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await self.finish(send)


def pieces_response(pieces: Sequence[bytes]) -> Response:
    """JSON that comes in pieces, and is sent in them: one write of megabytes would hold up all."""
    return _InPieces(pieces)
