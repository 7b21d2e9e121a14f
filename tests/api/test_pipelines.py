"""Requests of one connection take turns with all others, however its client sends them."""

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from legato.api.config import ServerConfig
from legato.api.http.connection import LimitedHttpProtocol
from legato.api.http.outlet import Turns
from legato.api.limits import MAX_PIPELINED_BYTES

NEAR, FAR = socket.socketpair()
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
_NUM_CONNECTIONS, _NUM_REQUESTS = 10, 50
_MOST_TURNS = 100_000


class FakeTransport(asyncio.Transport):
    """Attributes: `is_read`, `written`, `is_closed`.

    Args:
        sock: whose client is there.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__({"socket": sock})
        self.is_read = True
        self.written = bytearray()
        self.is_closed = False

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def write(self, data: bytes) -> None:  # type: ignore[override]
        assert not self.is_closed, "as uvloop's would fail"
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


class Echo:
    """An application that tells what it was asked.

    Attributes: `asked` are method, path and body of each request, in the order of their answers.

    Args:
        is_answering: cleared, answers wait.
    """

    def __init__(self, is_answering: asyncio.Event | None = None) -> None:
        self.asked: list[tuple[str, str, bytes]] = []
        self.num_begun = 0
        self._is_answering = is_answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if self._is_answering is not None:
            await self._is_answering.wait()
        self.asked.append((scope["method"], scope["path"], body))
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})


def connected(app: ASGIApp, turns: Turns) -> tuple[LimitedHttpProtocol, FakeTransport]:
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
    config.load()
    config.loaded_app = app
    protocol = LimitedHttpProtocol(
        ServerConfig(), turns, lambda _status: None,
        config=config, server_state=ServerState(), app_state={},
    )  # fmt: skip
    transport = FakeTransport(NEAR)
    protocol.connection_made(transport)
    return protocol, transport


async def turns_until(condition: Callable[[], bool]) -> int:
    for turn in range(_MOST_TURNS):
        if condition():
            return turn
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


def test_a_pipeline_is_not_parsed_before_it_is_answered() -> None:
    async def run() -> None:
        is_answering = asyncio.Event()
        app = Echo(is_answering)
        protocol, transport = connected(app, Turns())
        protocol.data_received(GET * 14_000)
        for _ in range(100):
            await asyncio.sleep(0)
        assert app.num_begun == 1
        assert not protocol.pipeline
        assert not transport.is_read, "there is enough to do"
        is_answering.set()
        await turns_until(lambda: transport.is_read)
        assert 0 < len(app.asked) <= 14_000
        await turns_until(lambda: len(app.asked) == 14_000)
        protocol.connection_lost(None)

    asyncio.run(run())


def test_a_short_pipeline_is_read_on_so_that_its_client_is_known_to_be_there() -> None:
    async def run() -> None:
        protocol, transport = connected(Echo(asyncio.Event()), Turns())
        protocol.data_received(GET)
        protocol.data_received(b"x" * MAX_PIPELINED_BYTES)
        assert transport.is_read
        protocol.data_received(b"x")
        assert not transport.is_read
        protocol.connection_lost(None)

    asyncio.run(run())


def test_in_a_turn_of_the_loop_one_waiting_request_begins_whichever_connection_s() -> None:
    async def run() -> None:
        app, turns = Echo(), Turns()
        connections = [connected(app, turns) for _ in range(_NUM_CONNECTIONS)]
        for protocol, _ in connections:
            protocol.data_received(GET * _NUM_REQUESTS)
        await asyncio.sleep(0)
        num_before = app.num_begun
        while len(app.asked) < _NUM_CONNECTIONS * _NUM_REQUESTS:
            await asyncio.sleep(0)
            assert app.num_begun - num_before <= 1
            num_before = app.num_begun
        for protocol, transport in connections:
            assert transport.written.count(b"HTTP/1.1 200") == _NUM_REQUESTS
            protocol.connection_lost(None)

    asyncio.run(run())


def test_a_client_that_is_gone_has_no_turn() -> None:
    async def run() -> None:
        app, turns = Echo(), Turns()
        protocol, transport = connected(app, turns)
        protocol.data_received(GET + GET)
        protocol.eof_received()
        blocking = [asyncio.Event() for _ in range(_NUM_CONNECTIONS)]
        for event in blocking:
            turns.wait(event.set)
        await turns_until(lambda: len(app.asked) == 1)  # the second request has its turn to come
        transport.abort()
        protocol.connection_lost(ConnectionResetError())
        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failures.append(what))
        last = asyncio.Event()
        turns.wait(last.set)
        await last.wait()
        assert not failures
        assert len(app.asked) == 1

    asyncio.run(run())


def test_a_cut_within_an_empty_line_lets_no_request_in_early() -> None:
    async def run() -> None:
        for cut in range(1, len(GET)):
            protocol, _ = connected(Echo(asyncio.Event()), Turns())
            protocol.data_received(GET[:cut])
            protocol.data_received(GET[cut:] + GET)
            assert not protocol.pipeline, cut
            protocol.connection_lost(None)

    asyncio.run(run())


def test_of_a_pipeline_of_garbage_one_request_is_refused() -> None:
    async def run() -> None:
        app = Echo()
        protocol, transport = connected(app, Turns())
        protocol.data_received(GET + b"GET / HTTP/9.9\r\n\r\n" * 10_000)
        await turns_until(lambda: transport.is_closed)
        assert transport.written.count(b"HTTP/1.1 200") == 1
        assert transport.written.count(b"HTTP/1.1 400") == 1
        assert len(app.asked) == 1
        protocol.connection_lost(None)

    asyncio.run(run())


_BODIES = st.one_of(
    st.binary(max_size=64), st.sampled_from([b"\n\n", b"\r\n\r\n", b"0\r\n\r\n", GET, b"x" * 9000])
)


@st.composite
def _requests(draw: st.DrawFn) -> tuple[bytes, tuple[str, str, bytes]]:
    """The bytes of one, and what is to be heard of it."""
    path = draw(st.sampled_from(["/", "/a", "/health"]))
    method = draw(st.sampled_from(["GET", "HEAD", "POST"]))
    line = (
        draw(st.sampled_from([b"", b"\r\n"])) + f"{method} {path} HTTP/1.1\r\nHost: a\r\n".encode()
    )
    if method != "POST":
        return line + b"\r\n", (method, path, b"")
    if draw(st.booleans()):
        body = draw(_BODIES)
        return line + b"Content-Length: %d\r\n\r\n" % len(body) + body, (method, path, body)
    chunks = [chunk for chunk in draw(st.lists(_BODIES, max_size=4)) if chunk]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    trailer = draw(st.sampled_from([b"", b"X: y\r\n"]))
    wire = line + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n" + trailer + b"\r\n"
    return wire, (method, path, b"".join(chunks))


@given(
    pipelines=st.lists(st.lists(_requests(), min_size=1, max_size=5), min_size=1, max_size=3),
    sizes=st.lists(st.one_of(st.integers(1, 9), st.integers(1, 20_000)), min_size=1, max_size=20),
    ends=st.booleans(),
)
def test_requests_are_answered_in_order_however_they_are_cut(
    pipelines: list[list[tuple[bytes, tuple[str, str, bytes]]]], sizes: list[int], ends: bool
) -> None:
    async def send(pipeline: list[tuple[bytes, tuple[str, str, bytes]]], turns: Turns) -> None:
        app = Echo()
        protocol, transport = connected(app, turns)
        wire, cuts = b"".join(data for data, _ in pipeline), 0
        while wire:
            size = sizes[cuts % len(sizes)]
            if transport.is_read:
                protocol.data_received(wire[:size])
                wire, cuts = wire[size:], cuts + 1
                assert not protocol.pipeline, "none is parsed before it is its turn"
            if cuts % 3:
                await asyncio.sleep(0)
        if ends:
            await turns_until(lambda: transport.is_read)
            protocol.eof_received()
        await turns_until(lambda: len(app.asked) == len(pipeline))
        assert app.asked == [heard for _, heard in pipeline]
        assert transport.written.count(b"HTTP/1.1 200 OK") == len(pipeline)
        await asyncio.sleep(0)
        assert transport.is_closed == ends
        protocol.connection_lost(None)

    async def run() -> None:
        turns = Turns()
        await asyncio.gather(*(send(pipeline, turns) for pipeline in pipelines))

    asyncio.run(run())
