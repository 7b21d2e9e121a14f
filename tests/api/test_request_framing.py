"""Where a request's body ends: a proxy in front must never see another end than the server does."""

import pytest

from tests.api.launch import ServerProcess
from tests.api.wire import connect, is_closed, read_error, read_response

HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt":"Hi"}'
LENGTH = b"Content-Length: 15\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"f\r\n" + BODY + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize("num_bytes", [10**9, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("head", [HEAD, b"GET /health HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_length_that_is_never_read_is_refused_at_once(
    server: ServerProcess, num_bytes: int, head: bytes
) -> None:
    with connect(server) as sock:
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % num_bytes)
        assert read_error(sock) == (413, "request_too_large")
        assert is_closed(sock)


@pytest.mark.parametrize(
    "codings",
    [
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: gzip\r\n" + CHUNKED,
        b"Transfer-Encoding: gzip\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding: , chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked;q=1\r\n",
        b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: gzip, chunked\r\n",
    ],
)
def test_an_unknown_transfer_coding(server: ServerProcess, codings: bytes) -> None:
    with connect(server) as sock:
        sock.sendall(HEAD + codings + b"\r\n" + CHUNKS)
        assert read_error(sock) == (501, "unknown_transfer_coding")
        assert is_closed(sock)


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"Content-Length: 18446744073709551616\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: +15\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 0x0f\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 15, 15\r\n\r\n" + BODY,
        HEAD + b"Content-Length: \r\n\r\n",
        HEAD + LENGTH + LENGTH + b"\r\n" + BODY,
        HEAD + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY,
        HEAD + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
        HEAD + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
        HEAD + CHUNKED + CHUNKED + b"\r\n" + CHUNKS,
        HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + CHUNKS,
        HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKS,
        HEAD.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS,
        HEAD + b"Content-Length : 15\r\n\r\n" + BODY,
        HEAD + b"Content-Length:\r\n 15\r\n\r\n" + BODY,
        HEAD + b"X: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY,
        HEAD + b"X: a\rb\r\n" + LENGTH + b"\r\n" + BODY,
        HEAD + b"X: a\0b\r\n" + LENGTH + b"\r\n" + BODY,
        HEAD + b"Host: localhost\r\n" + LENGTH + b"\r\n" + BODY,
        (HEAD + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY,
        HEAD + CHUNKED + b"\r\n-1\r\n",
        HEAD + CHUNKED + b"\r\n0xf\r\n" + BODY + b"\r\n0\r\n\r\n",
        HEAD + CHUNKED + b"\r\nf\n" + BODY + b"\n0\n\n",
        HEAD + CHUNKED + b"\r\n10000000000000000f\r\n" + BODY,
        HEAD + CHUNKED + b"\r\nf\r\n" + BODY + b"\r\n0\r\nContent-Length: 9\r\n\r\n",
    ],
)
def test_an_end_that_can_be_read_in_two_ways(server: ServerProcess, request_bytes: bytes) -> None:
    """Most of these are httptools' refusals, without any of its leniencies."""
    with connect(server) as sock:
        sock.sendall(request_bytes)
        assert read_error(sock) == (400, None)
        assert is_closed(sock)


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked", b"  chunked  "])
def test_chunks_are_read(server: ServerProcess, coding: bytes) -> None:
    with connect(server) as sock:
        for _ in range(2):
            sock.sendall(HEAD + b"Transfer-Encoding:" + coding + b"\r\n\r\n" + CHUNKS)
            status, body = read_response(sock)
            assert (status, body[:10]) == (200, b'{"count":1')


@pytest.mark.parametrize(
    ("request_bytes", "is_taken"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", False),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", False),
        (b"GET /health HTTP/1.0\r\n\r\n", True),
        (b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n", True),
        # As probes call a pod.
        (b"GET /health HTTP/1.1\r\nHost: 10.244.0.7:8000\r\n\r\n", True),
        (b"GET /ping HTTP/1.1\r\nHost: [fd00:10:244::7]:8000\r\n\r\n", True),
        (b"HEAD /ping HTTP/1.0\r\nHost: [::ffff:10.244.0.7]\r\n\r\n", True),
        (b"GET /v1/models HTTP/1.1\r\nHost: [fe80::1%eth0]:8000\r\n\r\n", True),
        (b"GET /v1/models HTTP/1.1\r\nHost: 169.254.1.1\r\n\r\n", True),
    ],
)
def test_a_request_names_one_host(
    server: ServerProcess, request_bytes: bytes, is_taken: bool
) -> None:
    with connect(server) as sock:
        sock.sendall(request_bytes)
        if is_taken:
            assert sock.recv(12)[-3:] == b"200"
            return
        status, body = read_response(sock)
        assert status == 400
        assert b"one Host header" in body
        assert is_closed(sock)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (LENGTH + b"Content-Encoding: br\r\n", 415),
        (CHUNKED + b"Content-Encoding: br\r\n", 415),
        (LENGTH + b"Origin: http://evil.example\r\n", 403),
        (b"Content-Length: 99999999999\r\n", 413),
    ],
)
def test_a_client_that_waits_to_be_asked_and_is_refused(
    server: ServerProcess, headers: bytes, status: int
) -> None:
    """Its next request is not read as the body that it does not send."""
    with connect(server) as sock:
        sock.sendall(HEAD + headers + b"Expect: 100-continue\r\n\r\n")
        received = b""
        while data := sock.recv(2**16):
            received += data
        head, _, _ = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in head.lower()


def test_a_client_that_waits_to_be_asked_and_does_not_goes_on(server: ServerProcess) -> None:
    """With its body there already, nothing can be read as it."""
    refused = HEAD + LENGTH + b"Content-Encoding: br\r\nExpect: 100-continue\r\n\r\n" + BODY
    with connect(server) as sock:
        for _ in range(2):
            sock.sendall(refused)
            assert read_response(sock)[0] == 415
