"""Writes tokens to the connection directly, past ASGI's `send`.

`send` passes through all middleware, in a task of the stream's own: each token would wake a task
and walk that chain. An answer still begins and ends with `send`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "legato.outlet"
_MOST_WAITING_BYTES = 64 * 2**10
"""The most bytes that wait in an `AsgiOutlet`; more wait with their stream."""


class NotifyingFlow(FlowControl):
    """uvicorn's flow control, which reports when the client reads again, and can hold reading.

    Attributes:
        on_writable: called when the client reads again.
    """

    on_writable: Callable[[], object] = staticmethod(lambda: None)
    _is_held = False

    def hold_reading(self) -> None:
        """Stop reading until `release_reading`, even if the application asks for more."""
        self._is_held = True
        self._transport.pause_reading()

    def release_reading(self) -> None:
        """Undo `hold_reading`; without one, this has no effect."""
        if self._is_held:
            self._is_held = False
            if not self.read_paused:
                self._transport.resume_reading()

    def resume_reading(self) -> None:
        if self._is_held:
            self.read_paused = False
        else:
            super().resume_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.on_writable()


class Outlet(ABC):
    """Writes the body of one answer, between its beginning and its end."""

    @classmethod
    def of(cls, scope: Scope) -> "Outlet":
        """Return the outlet of a request's answer."""
        outlet: Outlet = scope["extensions"][_EXTENSION]
        return outlet

    def put_into(self, scope: Scope) -> None:
        scope["extensions"] = {_EXTENSION: self}

    @property
    @abstractmethod
    def is_writable(self) -> bool:
        """Whether the answer has begun and the client keeps up."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Write a piece of the body; it is dropped if the client is gone."""

    @abstractmethod
    def watched(self, on_writable: Callable[[], object]) -> AbstractContextManager[None]:
        """Call this whenever the client has caught up."""

    @abstractmethod
    async def caught_up(self) -> None:
        """Wait until the client has caught up or disconnected."""


class ConnectionOutlet(Outlet):
    """Writes to one of this server's own connections.

    Args:
        cycle: the request being answered, on a connection with a `NotifyingFlow`.
    """

    def __init__(self, cycle: RequestResponseCycle, flow: NotifyingFlow) -> None:
        self._cycle = cycle
        self._flow = flow

    @property
    def is_writable(self) -> bool:
        return self._cycle.response_started and not self._flow.write_paused

    def write(self, data: bytes) -> None:
        cycle = self._cycle
        if cycle.disconnected or not data:  # an empty chunk would end the answer
            return
        if cycle.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        cycle.transport.write(data)

    @contextmanager
    def watched(self, on_writable: Callable[[], object]) -> Iterator[None]:
        self._flow.on_writable = on_writable
        try:
            yield
        finally:
            del self._flow.on_writable

    async def caught_up(self) -> None:
        await self._flow.drain()


class AsgiOutlet(Outlet):
    """Writes with ASGI's `send`, for another server's connections.

    Pieces written during a `send` go together into the next.

    Args:
        send: ASGI's; the application must use this outlet's `send` in its place.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = False
        self._waiting = bytearray()
        self._sending: asyncio.Task[None] | None = None
        self._on_writable: Callable[[], object] = _nothing

    async def send(self, message: Message) -> None:
        """Send what was written so far, then this message."""
        if self._sending is not None:
            await self._sending
        await self._send(message)
        self._has_begun = True

    @property
    def is_writable(self) -> bool:
        return self._has_begun and len(self._waiting) < _MOST_WAITING_BYTES

    def write(self, data: bytes) -> None:
        self._waiting += data
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_waiting())

    @contextmanager
    def watched(self, on_writable: Callable[[], object]) -> Iterator[None]:
        self._on_writable = on_writable
        try:
            yield
        finally:
            self._on_writable = _nothing

    async def caught_up(self) -> None:
        if self._sending is not None:
            await self._sending

    async def _send_waiting(self) -> None:
        while self._waiting:
            body = bytes(self._waiting)
            self._waiting.clear()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            self._on_writable()


def _nothing() -> None:
    pass
