"""Writes answers: tokens at once, and large answers in small slices, in turns.

Tokens go to the connection directly, past ASGI's `send`, which passes through all middleware in a
task of the stream's own: each token would wake a task and walk that chain. An answer still begins
and ends with `send`.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from legato.api.http.bodies import JSON, StreamedResponse
from legato.api.http.json_text import cut

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


class Turns:
    """Calls waiting callbacks in order, one per iteration of the event loop.

    However many wait, they block the event loop for no longer than one of them takes.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()

    def wait(self, go_on: Callable[[], object]) -> None:
        """Call this once, in its turn."""
        self._waiting.append(go_on)
        if len(self._waiting) == 1:
            self._schedule()

    async def turn(self) -> None:
        """Wait for a turn."""
        begun = asyncio.Event()
        self.wait(begun.set)
        await begun.wait()

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_soon(self._call_next)

    def _call_next(self) -> None:
        go_on = self._waiting.popleft()
        if self._waiting:
            self._schedule()
        go_on()


_SLICE_S = 0.001
_SLICE_BYTES = 2**16


class PacedResponse(StreamedResponse):
    """A body made while it is sent, no faster than its client reads.

    Args:
        turns: shared by all answers in progress.
    """

    def __init__(self, pieces: Iterable[bytes], turns: Turns, media_type: str = JSON) -> None:
        super().__init__({}, media_type)
        self._pieces = cut(pieces)
        self._turns = turns

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        first, is_all = next_slice(self._pieces)
        if is_all:
            self.headers["Content-Length"] = str(sum(map(len, first)))
        await self.begin(send)
        await _send(send, first, is_all=is_all)
        if not is_all:
            await self._turns.turn()
            await send_paced(send, self._pieces, self._turns)


async def send_paced(send: Send, pieces: Iterable[bytes], turns: Turns) -> None:
    """Send the rest of a body while it is made. Args: as of `PacedResponse`."""
    unread = cut(pieces)
    while True:
        made, is_all = next_slice(unread)
        await _send(send, made, is_all=is_all)
        if is_all:
            return
        await turns.turn()


def next_slice(pieces: Iterator[bytes]) -> tuple[list[bytes], bool]:
    """Return the pieces made in one turn, and whether they are the last."""
    ends_s = time.monotonic() + _SLICE_S
    made: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        made.append(piece)
        num_bytes += len(piece)
        if num_bytes >= _SLICE_BYTES or time.monotonic() > ends_s:
            return made, False
    return made, True


async def _send(send: Send, made: Iterable[bytes], *, is_all: bool) -> None:
    body = b"".join(made)
    await send({"type": "http.response.body", "body": body, "more_body": not is_all})
