"""Detects whether a client that sends no more still reads its answer.

A client that closes its connection and one that shuts only its sending side both send an end. They
differ in how they treat further bytes: the machine of the former answers with a reset. So the watch
sends the first bytes of the answer, which are always the same, one at a time, until the answer
begins.
"""

import asyncio
import select
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_BEGINNING = b"HTTP/1.1 "
_FIRST_DELAY_S = 0.01
_MAX_DELAY_S = 1.0


class HalfClosedWatch:
    """Aborts a connection once its client turns out to be gone.

    It probes at once, then at growing intervals while the connection is open. A proxy in between
    may need several probes, if it passes ends and bytes on.

    Args:
        answering: returns the request that is being answered; None between two of them.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        answering: Callable[[], RequestResponseCycle | None],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._answering = answering
        self._delay_s = _FIRST_DELAY_S
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket"), 0)  # errors and resets only
        self._look()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if self._poll.poll(0):
            self._transport.abort()
            return
        self._send_a_byte()
        self._loop.call_later(self._delay_s, self._look)
        self._delay_s = min(2 * self._delay_s, _MAX_DELAY_S)

    def _send_a_byte(self) -> None:
        cycle = self._answering()
        if cycle is None or cycle.response_started:
            return
        if not isinstance(cycle.transport, _Begun):
            cycle.transport = _Begun(cycle.transport)
        cycle.transport.send_a_byte()


class _Begun(asyncio.Transport):
    """A connection that has already sent the first bytes of an answer."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._num_sent = 0

    def send_a_byte(self) -> None:
        byte = _BEGINNING[self._num_sent : self._num_sent + 1]
        if byte:
            self._transport.write(byte)
            self._num_sent += 1

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self._transport.write(data[self._num_sent :])
        self._num_sent = 0

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
