"""Clients with large bodies, whole, in pieces, at once, or one behind the other."""

import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.client import HTTPException

from tests.api.launch import ServerProcess
from tests.api.wire import connect, post, read_response
from tests.fuzz.bodies import mutated
from tests.fuzz.clients import UnexpectedAnswerError, answer
from tests.fuzz.large_bodies import LARGE, Body

MAX_BODY_BYTES = 8 * 2**20
"""The default of `--max-body-size`."""
_SHARES = {1.0: 0.4, 0.5: 0.1, 1 / 16: 0.2, 1 / 128: 0.2, 1.001: 0.1}
"""Of the largest body; value how often."""
_STAY_S = 4.0
"""How long a client waits for what the model has to compute."""
_NUM_AT_ONCE, _NUM_PIPELINED, _NUM_PIECES = 16, 4, 8
_PIECE_S = 0.02
_NUM_FLOOD, _FLOOD_BYTES = 50, 100

Send = Callable[[ServerProcess, Body], list[str]]


def send_whole(server: ServerProcess, body: Body) -> list[str]:
    return [_exchange(server, body, lambda sock, wire: sock.sendall(wire))]


def send_at_once(server: ServerProcess, body: Body) -> list[str]:
    """The same body over many connections."""
    with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
        return [
            told for [told] in pool.map(lambda _: send_whole(server, body), range(_NUM_AT_ONCE))
        ]


def send_pieces(server: ServerProcess, body: Body) -> list[str]:
    """With pauses, in which the server has read a part of it."""

    def send(sock: socket.socket, wire: bytes) -> None:
        size = len(wire) // _NUM_PIECES + 1
        for start in range(0, len(wire), size):
            sock.sendall(wire[start : start + size])
            time.sleep(_PIECE_S)

    return [_exchange(server, body, send)]


def send_chunks(server: ServerProcess, body: Body) -> list[str]:
    """In HTTP's chunks, each of a few bytes."""
    path, content = body
    size = max(4, len(content) // 100_000)
    chunks = [content[start : start + size] for start in range(0, len(content), size)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    )
    return [_exchange(server, body, lambda sock, _: sock.sendall(head.encode() + framed))]


def send_pipelined(server: ServerProcess, body: Body) -> list[str]:
    """Several over one connection, without waiting for answers."""
    return [_exchange(server, body, lambda sock, wire: sock.sendall(wire * _NUM_PIPELINED))]


def send_flood(server: ServerProcess, body: Body) -> list[str]:
    """Only its beginning, but very often, over many connections."""
    path, content = body
    wire = post(path, content[:_FLOOD_BYTES]) * _NUM_FLOOD

    def send(_: int) -> list[str]:
        with connect(server) as sock:
            try:
                sock.sendall(wire)
                return [_status(sock) for _ in range(_NUM_FLOOD)]
            except (ConnectionError, HTTPException):
                return ["disconnected"]

    with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
        return [told for each in pool.map(send, range(_NUM_AT_ONCE)) for told in each]


def send_and_leave(server: ServerProcess, body: Body) -> list[str]:
    with connect(server) as sock:
        try:
            sock.sendall(post(*body))
        except ConnectionError:
            return ["disconnected"]
    return ["left"]


SENDS: dict[Send, float] = {
    send_whole: 0.45,
    send_at_once: 0.15,
    send_flood: 0.05,
    send_pieces: 0.1,
    send_chunks: 0.05,
    send_pipelined: 0.1,
    send_and_leave: 0.1,
}
"""Value how often it comes."""


def large_body(rng: random.Random, seed: int, max_bytes: int) -> tuple[str, Body]:
    """Its kind, which takes turns by the seed, and a body of any size up to a little too large."""
    kind = list(LARGE)[seed % len(LARGE)]
    (share,) = rng.choices(list(_SHARES), list(_SHARES.values()))
    path, content = LARGE[kind](rng, int(share * max_bytes))
    return kind, (path, mutated(rng, content) if rng.random() < 0.1 else content)


def overwhelm(
    server: ServerProcess, seed: int, max_bytes: int = MAX_BODY_BYTES
) -> tuple[str, Counter[str]]:
    """Let one client come.

    Returns:
        The kind of its body, and what it was told as by `clients.attack`.

    Raises:
        As `clients.attack`.
    """
    rng = random.Random(seed)
    kind, body = large_body(rng, seed, max_bytes)
    (send,) = rng.choices(list(SENDS), list(SENDS.values()))
    return kind, Counter(send(server, body))


def _exchange(
    server: ServerProcess, body: Body, send: Callable[[socket.socket, bytes], None]
) -> str:
    is_computed = body[0].startswith("/v1/")
    with connect(server) as sock:
        if is_computed:
            sock.settimeout(_STAY_S)
        try:
            send(sock, post(*body))
            return answer(sock)
        except ConnectionError:
            return "disconnected"
        except TimeoutError:
            if is_computed:
                return "left"
            raise


def _status(sock: socket.socket) -> str:
    status, body = read_response(sock)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise UnexpectedAnswerError(f"{status}: {body!r}")
    return str(status)
