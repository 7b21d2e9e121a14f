"""Server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
# Proxies must not collect what is read live.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: bytes) -> bytes:
    """`data` as an event; it must not contain line breaks, which JSON escapes."""
    return b"data: " + data + b"\n\n"


class EventStream(StreamingResponse):
    """Sends each event the moment it comes, and closes the generator however the stream ends.

    It does not look for disconnects, as its base class would: `CancelOnDisconnect` does.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers=_HEADERS, media_type="text/event-stream")
        self._events = events

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": HTTPStatus.OK,
            "headers": self.raw_headers,
        }
        async with aclosing(self._events):
            await send(start)
            async for body in self._events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
