"""Clients that are slow, silent or too many take up a connection for a while, and nothing else."""

import contextlib
import http.client
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.api.launch import ServerProcess, long_request, running_server, wait_until
from tests.api.wire import connect, is_closed, post, read_error, read_response

FLAGS = (
    "--timeout-header", "2s", "--timeout-body", "1s", "--timeout-write", "2s",
    "--timeout-keep-alive", "3s", "--max-header-size", "8K", "--max-connections", "20",
    "--max-body-size", "64K",
)  # fmt: skip
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("strict"), *FLAGS) as process:
        yield process


def drip(sock: socket.socket, data: bytes, stop: threading.Event) -> None:
    """Send a byte at a time, each before the server's patience is over, until it is."""
    with contextlib.suppress(OSError):
        for i in range(len(data)):
            if stop.wait(0.1):
                return
            sock.sendall(data[i : i + 1])


@contextlib.contextmanager
def dripping(sock: socket.socket, data: bytes) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=drip, args=(sock, data, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def is_healthy(server: ServerProcess) -> bool:
    """Whether a new connection is served."""
    with connect(server) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(HEALTH)
        return read_response(sock)[0] == 200
    return False


def test_silent_connections_are_closed(strict: ServerProcess) -> None:
    with connect(strict) as new, connect(strict) as used:
        used.sendall(HEALTH)
        assert read_response(used)[0] == 200
        assert is_closed(new)
        assert is_closed(used)


def test_slow_headers(strict: ServerProcess) -> None:
    errors = strict.metric("request_errors_total", status="408")
    with connect(strict) as sock, dripping(sock, b"GET /health HTTP/1.1\r\nX: " + b"x" * 600):
        assert read_error(sock) == (408, "request_timeout")
        assert is_closed(sock)
    assert strict.metric("request_errors_total", status="408") == errors + 1


def test_slow_headers_of_a_second_request(strict: ServerProcess) -> None:
    with connect(strict) as sock:
        sock.sendall(HEALTH)
        assert read_response(sock)[0] == 200
        with dripping(sock, b"GET /health HTTP/1.1\r\nX: " + b"x" * 600):
            assert read_error(sock) == (408, "request_timeout")


@pytest.mark.parametrize("length", ["Content-Length: 600", "Transfer-Encoding: chunked"])
def test_slow_body(strict: ServerProcess, length: str) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n"
    with connect(strict) as sock:
        sock.sendall(head.encode())
        with dripping(sock, b"1\r\nx\r\n" * 100):
            assert read_error(sock) == (408, "request_timeout")
            assert is_closed(sock)


def test_a_body_that_keeps_coming_may_take_its_time(strict: ServerProcess) -> None:
    request = post("/tokenize", {"prompt": "x" * 40_000})
    with connect(strict) as sock:
        for start in range(0, len(request), 4096):
            sock.sendall(request[start : start + 4096])
            time.sleep(0.2)
        assert read_response(sock)[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X: x\r\n" * 9000,
        b"GET /" + b"x" * 9000,
        CHUNKED + b"0\r\n" + b"X: x\r\n" * 9000,
        b"\r\n" * 9000,
    ],
    ids=["long", "many", "url", "trailers", "nothing"],
)
def test_large_headers(strict: ServerProcess, data: bytes) -> None:
    with connect(strict) as sock:
        sock.sendall(data)
        assert read_error(sock) == (431, "headers_too_large")
        assert is_closed(sock)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nX: ",
        CHUNKED + b"1;",
    ],
    ids=["header", "chunk extension"],
)
def test_what_has_no_end_and_means_nothing_yet(strict: ServerProcess, head: bytes) -> None:
    with connect(strict) as sock:
        sock.sendall(head)
        for _ in range(3):  # the third is too much
            time.sleep(0.1)
            sock.sendall(b"x" * 4096)
        assert read_error(sock) == (431, "headers_too_large")
        assert is_closed(sock)


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\x01\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_what_is_not_http(strict: ServerProcess, data: bytes) -> None:
    with connect(strict) as sock:
        sock.sendall(data)
        assert read_error(sock) == (400, None)
        assert is_closed(sock)


def test_a_body_without_end_is_not_read_for_ever(strict: ServerProcess) -> None:
    with connect(strict) as sock:
        sock.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"
        )
        with contextlib.suppress(ConnectionError):
            while True:
                sock.sendall(b"x" * 2**16)
        with contextlib.suppress(ConnectionError):  # the answer may be lost on who still sends
            assert read_error(sock) == (413, "request_too_large")


def test_pipelined_requests_are_answered_in_turn(strict: ServerProcess) -> None:
    completion = {"prompt": "Once", "max_tokens": 3, "ignore_eos": True}
    with connect(strict) as sock:
        sock.sendall(post("/v1/completions", completion) + HEALTH + b"GET /version HTTP/1.1\r\n")
        bodies = [read_response(sock) for _ in range(2)]
        assert [status for status, _ in bodies] == [200, 200]
        assert b"text_completion" in bodies[0][1]
        sock.sendall(b"Host: localhost\r\n\r\n")
        assert read_response(sock)[0] == 200


def test_too_many_connections(strict: ServerProcess) -> None:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(strict)) for _ in range(21)]
        assert read_error(socks[-1]) == (503, "overloaded")
    wait_until(lambda: is_healthy(strict), "the connections that were closed still count")


def test_a_client_that_does_not_read_loses_its_stream_and_nobody_else_does(
    strict: ServerProcess,
) -> None:
    """Its answer fills every buffer on the way; log probabilities make that quick."""
    aborted = strict.metric("request_success_total", finished_reason="abort")
    request = long_request(logprobs=20, n=8)
    with connect(strict, receive_buffer_bytes=4096) as idle:
        idle.sendall(post("/v1/completions", request))
        strict.wait_for_metric("num_requests_running", 8)
        with strict.http.stream(
            "POST", "/v1/completions", json=long_request(max_tokens=30)
        ) as other:
            lines = [line for line in other.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) == 31
        strict.wait_for_metric("num_requests_running", 0)
        assert strict.metric("kv_cache_usage_perc") == 0
        assert strict.metric("request_success_total", finished_reason="abort") == aborted + 1
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            read_response(idle)


def test_a_client_that_reads_slowly_keeps_its_stream(strict: ServerProcess) -> None:
    request = long_request(logprobs=20, n=8, max_tokens=40)
    received = bytearray()
    with connect(strict, receive_buffer_bytes=4096) as slow:
        slow.sendall(post("/v1/completions", request, "Connection: close\r\n"))
        while data := slow.recv(16384):
            received += data
            time.sleep(0.002)
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_files_never_run_out(tmp_path: Path) -> None:
    """With few open files allowed, there are fewer connections; the rest works on."""
    num_files, num_clients = 256, 400
    limits = (num_files, num_files)
    few_files = partial(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
    with ExitStack() as stack:
        server = stack.enter_context(running_server(tmp_path, before=few_files))
        assert server.http.get("/health").status_code == 200
        # Each asks for something that needs a process, which needs files.
        asked = post("/tokenize", {"prompt": "Hi"})
        clients = [stack.enter_context(connect(server)) for _ in range(num_clients)]
        told = Counter[bytes]()
        for client in clients:
            with suppress(OSError):  # it was refused already
                client.sendall(asked)
        for client in clients:
            with suppress(OSError):
                told[client.recv(12)] += 1
        assert told[b"HTTP/1.1 200"] == num_files // 2 - 1
        assert told.keys() <= {b"HTTP/1.1 200", b"HTTP/1.1 503", b""}
        body = {"prompt": "Hi", "max_tokens": 1}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        log = server.log.read_text()
        assert "128 connections at once rather than 4096" in log
        assert "Traceback" not in log
