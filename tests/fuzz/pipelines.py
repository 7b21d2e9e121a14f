"""Clients that send requests without waiting for answers: many, in pieces, over connections."""

import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus

from tests.api.launch import ServerProcess
from tests.api.wire import connect, post
from tests.fuzz.bodies import mutated, random_request
from tests.fuzz.clients import UnexpectedAnswerError

FLAGS = ("--max-model-len", "128", "--max-completions", "8", "--max-num-seqs", "8")
_MOST_BYTES = 256 * 2**10
"""Of a pipeline: what one read of the server's brings."""
_MOST_ANSWERS = 3000
"""Of all connections, so that a case does not take minutes."""
_STAY_S = 20.0
_SERVER_ERRORS = {str(status.value) for status in HTTPStatus if status.value >= 500}
_MOST_CUT_BYTES = len("HTTP/1.1 200")
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_PATHS = ["/", "/health", "/version", "/metrics", "/v1/models", "/nothing", "/v1/completions"]


def send_pipelines(server: ServerProcess, seed: int) -> tuple[str, Counter[str]]:
    """Let one client come, over one connection or several.

    Returns:
        The kind of its pipelines, and how many of each status it was told.

    Raises:
        UnexpectedAnswerError: an answer of 500 or more, or fewer answers than requests.
        TimeoutError: answers that do not come.
    """
    rng = random.Random(seed)
    kind = rng.choice(list(KINDS))
    num_connections = rng.choice([1, 1, 2, 10])
    requests = list(KINDS[kind](rng, _MOST_ANSWERS // num_connections))
    seeds = [rng.random() for _ in range(num_connections)]
    with ThreadPoolExecutor(num_connections) as pool:
        told = pool.map(lambda seed: _exchange(server, random.Random(seed), kind, requests), seeds)
        return f"{kind} on {num_connections}", sum(told, Counter[str]())


def _same(rng: random.Random, most: int) -> Iterable[bytes]:
    """One small request over and over."""
    head = f"{rng.choice(['GET', 'HEAD', 'OPTIONS', 'PUT'])} {rng.choice(_PATHS)} HTTP/1.1\r\n"
    head += "Host: localhost\r\n"
    request = head.encode() + rng.choice([b"\r\n", b"A:b\r\n" * 9 + b"\r\n"])
    return [request] * rng.randrange(1, min(most, _MOST_BYTES // len(request)))


def _mixed(rng: random.Random, most: int) -> Iterable[bytes]:
    """Requests of all kinds, all of them whole."""
    for _ in range(rng.randrange(1, min(most, 200))):
        if rng.random() < 0.9:
            yield next(iter(_same(rng, 3)))
        else:
            yield rng.choice([post, _in_chunks])("/tokenize", b'{"prompt":"a\\n\\n"}')


def _wild(rng: random.Random, most: int) -> Iterable[bytes]:
    """Requests that may be broken, or end the connection."""
    for _ in range(rng.randrange(1, min(most, 30))):
        path, body = random_request(rng)
        request = rng.choice([post, _in_chunks])(path, body)
        yield mutated(rng, request) if rng.random() < 0.1 else request


def _broken(rng: random.Random, _most: int) -> Iterable[bytes]:
    """Requests that are not HTTP/1.1."""
    request = rng.choice(
        [b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n", b"\0", b"GET / HTTP/1.1\r\n:\r\n\r\n"]
    )
    return [request] * (_MOST_BYTES // len(request))


KINDS = {"same": _same, "mixed": _mixed, "wild": _wild, "broken": _broken}
_IS_WHOLE = {"same", "mixed"}
"""Kinds each of whose requests is answered."""


def _in_chunks(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    framed = b"".join(b"1\r\n%b\r\n" % body[i : i + 1] for i in range(len(body)))
    return head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


def _exchange(
    server: ServerProcess, rng: random.Random, kind: str, requests: list[bytes]
) -> Counter[str]:
    with connect(server, receive_buffer_bytes=rng.choice([None, None, 4096])) as sock:
        sock.settimeout(_STAY_S)
        sending = threading.Thread(target=_send, args=(sock, rng, b"".join(requests)))
        sending.start()
        try:
            if rng.random() < 0.1:
                time.sleep(0.2)
                return Counter(["left"])
            told = _read(sock)
        finally:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sending.join()
    if bad := [status for status in told if status in _SERVER_ERRORS]:
        raise UnexpectedAnswerError(f"answers of {', '.join(bad)}")
    if kind in _IS_WHOLE and told.total() != len(requests):
        raise UnexpectedAnswerError(f"{len(requests)} requests got {told.total()} answers")
    return told


def _send(sock: socket.socket, rng: random.Random, data: bytes) -> None:
    """In pieces of any size, and then the end."""
    most = rng.choice([7, 100, 5000, _MOST_BYTES])
    try:
        if len(data) // most < 2000:
            while data:
                size = rng.randrange(1, most + 1)
                sock.sendall(data[:size])
                data = data[size:]
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        return


def _read(sock: socket.socket) -> Counter[str]:
    """Statuses until the end."""
    told: Counter[str] = Counter()
    rest = b""
    try:
        while data := sock.recv(2**16):
            rest += data
            end = 0
            for found in _STATUS.finditer(rest):
                told[found[1].decode()] += 1
                end = found.end()
            rest = rest[max(end, len(rest) - _MOST_CUT_BYTES) :]
    except ConnectionError:
        told["cut off"] += 1
    return told
