"""HTTP by hand, for clients that no library would be."""

import http.client
import json
import socket
from typing import IO, Any, Literal, cast
from urllib.parse import urlsplit

from tests.api.launch import ServerProcess

_PATIENCE_S = 60.0


def connect(server: ServerProcess, receive_buffer_bytes: int | None = None) -> socket.socket:
    """A connection that fails a test where the server leaves it waiting."""
    address = urlsplit(server.url)
    sock = socket.socket()
    if receive_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    sock.settimeout(_PATIENCE_S)
    sock.connect((address.hostname, address.port))
    return sock


def post(path: str, body: Any, headers: str = "") -> bytes:
    """The bytes of a request; `body` is encoded as JSON unless it is bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n{headers}\r\n"
    )
    return head.encode() + content


class _NoReadAhead:
    """A socket whose file leaves what follows an answer for the next one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def makefile(self, mode: Literal["rb"]) -> IO[bytes]:
        return self._socket.makefile(mode, buffering=1)


def read_response(sock: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer.

    Raises:
        http.client.HTTPException: what comes is no answer, or nothing comes before the end.
    """
    response = http.client.HTTPResponse(cast("socket.socket", _NoReadAhead(sock)))
    response.begin()
    return response.status, response.read()


def read_error(sock: socket.socket) -> tuple[int, str | None]:
    """Status and code of the next answer, which must be OpenAI's error object."""
    status, body = read_response(sock)
    error = json.loads(body)["error"]
    assert error["message"]
    return status, error["code"]


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has nothing more to say on this connection; waits for either."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def named_events(stream: str) -> list[dict[str, Any]]:
    """Data of all events of a stream whose events have names, which are also the data's types."""
    *sent, rest = stream.split("\n\n")
    assert not rest
    found = []
    for one in sent:
        name, data = one.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found
