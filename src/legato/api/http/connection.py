"""One HTTP connection, limited so that its client can block no other.

uvicorn's own protocol waits for ever for headers, for a body and for a client that does not read.
It accepts headers of any size and any number of requests at once. Here each of these has a limit. A
client that exceeds one is disconnected, after the answers to its earlier requests.

A request is parsed once all before it on its connection are answered. Until then its bytes wait,
and when there are many of them, the client's next ones stay in the socket.
"""

import asyncio
import enum
import logging
import re
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, cast

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from legato.api.config import MIN_BODY_BYTES_S, ServerConfig
from legato.api.http.errors import (
    ApiError,
    headers_too_large,
    malformed_http,
    shutting_down,
    too_many_connections,
    too_slow,
)
from legato.api.http.half_closed import HalfClosedWatch
from legato.api.http.outlet import ConnectionOutlet, NotifyingFlow, Turns
from legato.api.http.parser import RequestParser, head_refusal
from legato.api.limits import MAX_PIPELINED_BYTES

logger = logging.getLogger(__name__)

_EMPTY_LINE = re.compile(rb"\A\r?\n|\n\r?\n")
"""The end of every head, and of every chunked body."""
_MOST_PARSED_BYTES = 4096
"""The most parsed in one call, where there may be a great many headers or chunks."""
_TURN_S = 0.001
"""How long a connection may parse before others have their turn."""


class _Awaited(enum.Enum):
    """The part that the client must send next."""

    REQUEST = enum.auto()
    HEADERS = enum.auto()
    BODY = enum.auto()


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits.

    Args:
        limits: on connections, bytes and times.
        turns: shared by all connections that have more to parse.
        count_error: called with the status of each refusal that no application sees.
        options: uvicorn's.
    """

    def __init__(
        self, limits: ServerConfig, turns: Turns, count_error: Callable[[int], None], **options: Any
    ) -> None:
        super().__init__(**options)
        self.parser = RequestParser(self)
        self._app, self.app = self.app, self._answer
        self._limits = limits
        self._turns = turns
        self._count_error = count_error
        self._awaited = _Awaited.REQUEST
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        self._num_withheld_bytes = 0  # given to the parser, which has reported nothing of them yet
        self._num_body_bytes = 0  # since the read timer was set
        self._num_unsent_bytes = 0  # when the write timer was set
        self._num_missing_bytes = 0  # of the body, if its length is known
        self._refusal: ApiError | None = None
        self._backlog = bytearray()  # received and not parsed yet
        self._awaits_turn = False
        self._answering: RequestResponseCycle | None = None
        self._is_half_closed = False  # by the client
        self._is_ending = False  # no more input is accepted
        self._last_words = b""  # an error to send after the current answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = NotifyingFlow(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(too_many_connections(self._limits.max_connections))
        else:
            self._await(_Awaited.REQUEST)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._read_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._backlog.clear()
        super().connection_lost(exc)

    # Input

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            return
        self._backlog += data
        if not self._awaits_turn:
            self._parse()
        if len(self._backlog) > MAX_PIPELINED_BYTES:
            self._limited_flow.hold_reading()

    def _parse(self) -> None:
        """Parse until a request must wait for an earlier one, or the connection's turn is over."""
        self._awaits_turn = False
        if self.transport.is_closing():
            return
        ends_s = time.monotonic() + _TURN_S
        while num_bytes := self._num_parsable_bytes():
            if time.monotonic() > ends_s:
                self._await_turn()
                return
            segment = bytes(self._backlog[:num_bytes])
            del self._backlog[:num_bytes]
            self._num_withheld_bytes += num_bytes
            super().data_received(segment)
            if self._num_withheld_bytes > self._limits.max_header_bytes:
                self._refuse(headers_too_large(self._limits.max_header_bytes))
        if self._backlog:
            return
        self._limited_flow.release_reading()
        if self._is_half_closed:
            self._end()

    def _num_parsable_bytes(self) -> int:
        """Bytes at the start of the backlog to parse now; at most one request ends in them."""
        if self.transport.is_closing():
            return 0
        if self._awaited is _Awaited.BODY and self._num_missing_bytes:
            return min(len(self._backlog), self._num_missing_bytes)
        found = _EMPTY_LINE.search(self._backlog, 0, _MOST_PARSED_BYTES)
        if self._awaited is _Awaited.REQUEST and self._answering is not None:
            return found.end() if found is not None and found.start() == 0 else 0
        return min(len(self._backlog), _MOST_PARSED_BYTES) if found is None else found.end()

    def _await_turn(self) -> None:
        if self._awaits_turn:
            return
        self._awaits_turn = True
        self._turns.wait(self._parse)

    @property
    def _limited_flow(self) -> NotifyingFlow:
        assert isinstance(self.flow, NotifyingFlow)
        return self.flow

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # Not in the handler, which may start late while other streams' tokens are written.
        self.scope["state"]["received_s"] = time.monotonic()
        self._num_header_bytes = 0
        self._await(_Awaited.HEADERS)

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the head. Those of trailers only count: no key or name may come late."""
        self._count_header(len(name) + len(value))
        if self._awaited is _Awaited.HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._refusal = head_refusal(self.headers, self.parser.get_http_version())
        if self._refusal is not None:
            raise ValueError(str(self._refusal))
        super().on_headers_complete()
        self._answering = self.cycle
        self._num_missing_bytes = _body_length(self.headers)
        self._await(_Awaited.BODY)

    def on_chunk_header(self) -> None:
        self._num_withheld_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._num_withheld_bytes = 0
        self._num_body_bytes += len(body)
        self._num_missing_bytes -= min(len(body), self._num_missing_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser continues as if there were no upgrade
        super().on_message_complete()
        self._await(_Awaited.REQUEST)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to keep the connection: its client may still read answers."""
        self._is_half_closed = True
        if not self._backlog:
            self._end()
        if self.transport.is_closing():
            return False
        HalfClosedWatch(self.transport, self.loop, lambda: self._answering)
        return True

    def send_400_response(self, _msg: str) -> None:
        """Called when the parser or one of its callbacks raised."""
        self._refuse(self._refusal or malformed_http())

    def _count_header(self, num_bytes: int) -> None:
        self._num_withheld_bytes = 0
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self._limits.max_header_bytes:
            self._refusal = headers_too_large(self._limits.max_header_bytes)
            raise ValueError(str(self._refusal))

    def _await(self, awaited: _Awaited) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._awaited = awaited
        self._num_withheld_bytes = self._num_body_bytes = 0
        self._read_timer = self.loop.call_later(self._patience_s, self._on_read_timeout)

    @property
    def _patience_s(self) -> float:
        limits = self._limits
        return {
            _Awaited.REQUEST: limits.timeout_keep_alive_s,
            _Awaited.HEADERS: limits.timeout_header_s,
            _Awaited.BODY: limits.timeout_body_s,
        }[self._awaited]

    def _on_read_timeout(self) -> None:
        limits = self._limits
        if self.transport.is_closing():
            self.transport.abort()  # unlike close(), does not wait for unsent bytes
        elif self._is_client_waiting:
            self._await(self._awaited)
        elif self._awaited is _Awaited.REQUEST:
            self.transport.abort()
        elif self._awaited is _Awaited.HEADERS:
            message = f"the headers did not arrive within {limits.timeout_header_s:g} s"
            self._refuse(too_slow(message))
        elif self._num_body_bytes >= MIN_BODY_BYTES_S * limits.timeout_body_s:
            self._await(_Awaited.BODY)
        else:
            message = (
                f"the body did not arrive within {limits.timeout_body_s:g} s, nor did it come at "
                f"{MIN_BODY_BYTES_S} bytes a second"
            )
            self._refuse(too_slow(message))

    @property
    def _is_client_waiting(self) -> bool:
        """Whether the server must act next, so that the client's silence means nothing."""
        is_answering = self._awaited is _Awaited.REQUEST and self._answering is not None
        return is_answering or bool(self._backlog)

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing() or self._is_ending:
            return
        self._count_error(error.status)
        logger.debug("refused a connection: %s", error)
        self._end(_raw_response(error))

    # End of the connection

    def shutdown(self) -> None:
        """Called when the server ends: a body that is still coming is not waited for."""
        if self._answering is not None and self._answering.more_body:
            self._refuse(shutting_down())
        super().shutdown()

    def _end(self, last_words: bytes = b"") -> None:
        """Accept no more input, and close after the current answer."""
        if self._is_ending:
            return
        self._is_ending = True
        self._last_words = last_words
        self._backlog.clear()
        if self._answering is None or self._answering.more_body:  # its body will never be complete
            self._hang_up()

    def _hang_up(self) -> None:
        self.transport.write(self._last_words)
        self.transport.close()
        self._await(_Awaited.REQUEST)  # its timeout aborts a connection that does not close

    # Output

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = self._answering
        assert cycle is not None
        ConnectionOutlet(cycle, self._limited_flow).put_into(scope)
        if scope["http_version"] == "1.0":
            send = without_chunks(cycle)
        elif cycle.waiting_for_100_continue:
            send = closing_unless_continued(cycle)
        await self._app(scope, receive, send)

    def on_response_complete(self) -> None:
        self._answering = None
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._is_ending:
            self._hang_up()
        elif self._backlog:
            self._await_turn()
        elif self._awaited is _Awaited.REQUEST:
            self._await(_Awaited.REQUEST)

    def pause_writing(self) -> None:
        """Called when the client reads too slowly; the application waits until `resume_writing`."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _watch_writing(self) -> None:
        self._num_unsent_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(
            self._limits.timeout_write_s, self._on_write_timeout
        )

    def _on_write_timeout(self) -> None:
        if self.transport.get_write_buffer_size() < self._num_unsent_bytes:
            self._watch_writing()
            return
        logger.debug("a client read nothing for %g s", self._limits.timeout_write_s)
        self.transport.abort()


def _body_length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the declared length, validated by the parser; 0 without a body or if it is chunked."""
    lengths = dict(headers)
    return 0 if b"transfer-encoding" in lengths else int(lengths.get(b"content-length", 0))


def _raw_response(error: ApiError) -> bytes:
    """Return an error response for a connection without a valid request."""
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(error.body)),
        "Connection": "close",
        **(error.headers or {}),
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + error.body


def closing_unless_continued(cycle: RequestResponseCycle) -> Send:
    """Wrap `cycle.send` for a client that asks before it sends its body.

    It sends none after an error. Its next request must not be read as that body.
    """

    async def send(message: Message) -> None:
        if cycle.waiting_for_100_continue and cycle.more_body:
            cycle.keep_alive = False
        await cast("Send", cycle.send)(message)

    return send


def without_chunks(cycle: RequestResponseCycle) -> Send:
    """Wrap `cycle.send` for an HTTP/1.0 client, which knows neither chunks nor interim answers.

    The end of the connection ends an answer without a length.
    """
    cycle.waiting_for_100_continue = False
    is_open_ended = False

    async def send(message: Message) -> None:
        nonlocal is_open_ended
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message["headers"]}
            is_open_ended = b"content-length" not in names
            if is_open_ended:
                cycle.chunked_encoding = False
        elif is_open_ended:
            # Pass uvicorn's length check with any length.
            cycle.expected_content_length = len(message.get("body", b""))
        await cast("Send", cycle.send)(message)

    return send
