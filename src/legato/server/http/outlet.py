"""The way past ASGI for what is written token by token: to the connection, without a wait.

`send` is a coroutine behind those of all middleware, called in a task of the stream's own: for each
token that is a task to wake and a chain to go through. An answer still begins and ends with it.
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
"""What is written beside this, where a client does not keep up, waits with its stream."""


class NotifyingFlow(FlowControl):
    """uvicorn's flow control, which tells when the client reads again, and can hold reading.

    Attributes:
        on_writable: called when the client reads again.
    """

    on_writable: Callable[[], object] = staticmethod(lambda: None)
    _is_held = False

    def hold_reading(self) -> None:
        """Read no further until `release_reading`, though the application asks for more."""
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
    """Where the body of one answer goes, between its beginning and its end."""

    @classmethod
    def of(cls, scope: Scope) -> "Outlet":
        """That of a request's answer."""
        outlet: Outlet = scope["extensions"][_EXTENSION]
        return outlet

    def put_into(self, scope: Scope) -> None:
        scope["extensions"] = {_EXTENSION: self}

    @property
    @abstractmethod
    def is_writable(self) -> bool:
        """Whether the answer has begun, and its client keeps up with it."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Write a piece of the body; what a client that has gone would get is dropped."""

    @abstractmethod
    def watched(self, on_writable: Callable[[], object]) -> AbstractContextManager[None]:
        """Have this called whenever the client has caught up."""

    @abstractmethod
    async def caught_up(self) -> None:
        """Wait until the client has caught up, or gone."""


class ConnectionOutlet(Outlet):
    """To a connection of this server's.

    Args:
        cycle: what is being answered, on a connection with a `NotifyingFlow`.
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
    """By ASGI alone, where the connection is another server's: what comes while a piece is sent
    goes together in the next.

    Args:
        send: ASGI's, in whose place `send` is to be used.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = False
        self._waiting = bytearray()
        self._sending: asyncio.Task[None] | None = None
        self._on_writable: Callable[[], object] = _nothing

    async def send(self, message: Message) -> None:
        """Send what was written, and then this."""
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
