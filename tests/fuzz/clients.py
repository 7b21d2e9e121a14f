"""Clients of a real server, from merely wrong to hostile; what they were told is counted."""

import http.client
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable

from tests.api.launch import ServerProcess, long_request
from tests.api.wire import connect, post
from tests.fuzz.bodies import mutated, random_request

FLAGS = (
    "--max-model-len", "128", "--max-completions", "8", "--max-body-size", "256K",
    "--max-header-size", "8K", "--timeout-header", "1s", "--timeout-body", "1s",
    "--timeout-keep-alive", "2s", "--timeout-write", "2s", "--trust-request-chat-template",
)  # fmt: skip
"""Of a server under attack: small limits, which are met often."""

_HEADERS = [
    "", "X-Request-Id: a b\r\n", "X-Request-Id: \xff\r\n", "Authorization: Bearer \xfc\r\n",
    "Content-Encoding: gzip\r\n", "Expect: 100-continue\r\n", "Connection: close\r\n",
    "Connection: Upgrade\r\nUpgrade: websocket\r\n", "Connection: Upgrade\r\nUpgrade: h2c\r\n",
    "Origin: null\r\n", "X: " + "x" * 9000 + "\r\n", "Range: bytes=0-1\r\n", "Cookie: a\r\n" * 50,
    "Host: evil.example\r\n",
]  # fmt: skip
_CODINGS = ["gzip, chunked", "gzip", "chunked, chunked", "Chunked", ", chunked", "identity", ""]
_METHODS = ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "PRI"]
_TARGETS = [
    "/health", "/metrics", "/version", "/openapi.json", "/v1/models", "/v1/models/%00", "/",
    "/v1/models/%ff/../x", "//", "/%2e%2e/", "*", "http://x/health", "/health?a=%zz", "x:80", "/é",
    "/v1/completions", "/tokenize", "/" + "a" * 9000, "/v1/messages", "/v1/messages/x",
    "/v1/responses", "/v1/responses/resp_1", "/v1/responses/%00/input_items?limit=0",
    "/v1/responses/resp_1/cancel", "/inference/v1/generate",
    "/v1/responses/resp_1?stream=true&starting_after=-1",
]  # fmt: skip

_HONEST = {http.HTTPStatus.NOT_IMPLEMENTED}  # for a transfer coding
_ERRORS = ({"message", "type", "param", "code"}, {"message", "type"})
"""Fields of an error: OpenAI's, and Anthropic's."""
_ENDS = (
    b"data: [DONE]",
    b"event: response.completed\n",
    b"event: response.incomplete\n",
    b"event: message_stop\n",
)
"""How the last event of a stream begins that went well."""

Client = Callable[[ServerProcess, random.Random], str]


class UnexpectedAnswerError(AssertionError):
    """The server did what it must not do."""


def send_json(server: ServerProcess, rng: random.Random) -> str:
    """Any body, read to the end of its answer."""
    path, body = random_request(rng)
    with connect(server) as sock:
        sock.sendall(post(path, body, rng.choice([""] * 9 + _HEADERS)))
        return answer(sock)


def send_raw(server: ServerProcess, rng: random.Random) -> str:
    """Any bytes, or nearly HTTP."""
    target, method = rng.choice(_TARGETS), rng.choice(_METHODS)
    head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n{rng.choice(_HEADERS)}\r\n"
    path, body = random_request(rng)
    data = rng.choice(
        [
            head.encode("latin-1"),
            mutated(rng, head.encode("latin-1")),
            mutated(rng, post(path, body)),
            post(path, body).replace(b"Content-Length: ", b"Content-Length: 9"),
            post(path, body).replace(b"Content-Length: ", b"Content-Length: 9223372036854"),
            post(path, body, "Transfer-Encoding: chunked\r\n"),
            _chunked(path, body),
            _chunked(path, body, rng.choice(_CODINGS)),
            mutated(rng, _chunked(path, body)),
            rng.randbytes(rng.choice([1, 20, 20_000])),
        ]
    )
    with connect(server) as sock:
        try:
            sock.sendall(data)
            return answer(sock)
        except ConnectionError:
            return "disconnected"


def leave_early(server: ServerProcess, rng: random.Random) -> str:
    """Read a part of a stream, or nothing, and go away politely or not."""
    request = long_request(max_tokens=100, n=rng.choice([1, 1, 3]))
    with connect(server, receive_buffer_bytes=rng.choice([None, 2048])) as sock:
        sock.sendall(post("/v1/completions", request))
        for _ in range(rng.randrange(4)):
            sock.recv(rng.choice([1, 100, 4096]))
        kind = rng.choice(["closed", "reset", "half-closed", "spoken-into"])
        if kind == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif kind == "half-closed":
            sock.shutdown(socket.SHUT_WR)
            sock.recv(100)
        elif kind == "spoken-into":
            sock.sendall(rng.randbytes(rng.choice([10, 10_000])))
        time.sleep(rng.choice([0, 0.05]))
    return kind


def read_slowly(server: ServerProcess, rng: random.Random) -> str:
    """Read all of a stream, in small pieces, and expect all of it."""
    num_tokens = rng.randrange(1, 60)
    request = long_request(max_tokens=num_tokens)
    with connect(server, receive_buffer_bytes=2048) as sock:
        sock.sendall(post("/v1/completions", request, "Connection: close\r\n"))
        response = http.client.HTTPResponse(sock)
        response.begin()
        body = bytearray()
        while piece := response.read(rng.choice([1, 7, 300])):
            body += piece
    if response.status != http.HTTPStatus.TOO_MANY_REQUESTS:
        check(response.status, bytes(body), "text/event-stream")
        if body.count(b"\n\n") != num_tokens + 1:
            raise UnexpectedAnswerError(f"{num_tokens} tokens came as {bytes(body)!r}")
    return str(response.status)


CLIENTS: dict[Client, float] = {send_json: 0.7, send_raw: 0.2, leave_early: 0.07, read_slowly: 0.03}
"""Value how often it comes."""


def attack(server: ServerProcess, rng: random.Random) -> Counter[str]:
    """Let one client come.

    Returns:
        Key what it was told: a status, or how it went away.

    Raises:
        UnexpectedAnswerError: an answer of 500 or more but 501, or one that its client cannot read.
        TimeoutError: no answer at all.
    """
    (client,) = rng.choices(list(CLIENTS), list(CLIENTS.values()))
    return Counter([f"{client.__name__} {client(server, rng)}"])


def _chunked(path: str, body: bytes, coding: str = "chunked") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Transfer-Encoding: {coding}\r\n\r\n"
    )
    return head.encode() + f"{len(body):x};a=b\r\n".encode() + body + b"\r\n0\r\nX: y\r\n\r\n"


def answer(sock: socket.socket) -> str:
    """Read one answer and check it."""
    response = http.client.HTTPResponse(sock)
    try:
        response.begin()
        body = response.read()
    except (http.client.HTTPException, ConnectionError):
        return "disconnected"
    check(response.status, body, response.getheader("Content-Type") or "")
    return str(response.status)


def check(status: int, body: bytes, content_type: str) -> None:
    """Raises `UnexpectedAnswerError` where an answer is not what a client can read."""
    if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR and status not in _HONEST:
        raise UnexpectedAnswerError(f"{status}: {body!r}")
    if status >= http.HTTPStatus.BAD_REQUEST and body:
        error = json.loads(body)["error"]
        is_ollamas = isinstance(error, str) and bool(error)
        if not is_ollamas and (set(error) not in _ERRORS or not error["message"]):
            raise UnexpectedAnswerError(f"{status}: {body!r}")
    if content_type.startswith("text/event-stream"):
        *events, end, rest = body.split(b"\n\n")
        if not end.startswith(_ENDS) or rest:
            raise UnexpectedAnswerError(f"a stream ended with {body[-100:]!r}")
        for event in events:
            if "error" in json.loads(event.partition(b"data: ")[2]):
                raise UnexpectedAnswerError(f"a stream failed: {event!r}")
