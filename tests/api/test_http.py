"""What HTTP/1 lets clients do, and few of them do."""

import contextlib
import re
import socket
import threading
import time

import pytest

from tests.api.launch import ServerProcess, long_request
from tests.api.wire import connect, is_closed, post, read_error, read_response

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
COMPLETION = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True}
STREAM = {**COMPLETION, "stream": True}
UPGRADES = [
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAA\r\n",
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
]
VERSIONS = [b"HTTP/1.0", b"HTTP/1.1"]


def spoken_in(version: bytes, request: bytes) -> bytes:
    return request.replace(b"HTTP/1.1", version, 1)


def read_all(sock: socket.socket) -> bytes:
    """To the end of the connection."""
    received = bytearray()
    while data := sock.recv(2**16):
        received += data
    return bytes(received)


# Upgrades


@pytest.mark.parametrize("upgrade", UPGRADES, ids=["h2c", "websocket"])
def test_an_upgrade_is_ignored(server: ServerProcess, upgrade: str) -> None:
    """Its request has its body, and the connection goes on."""
    request = post("/v1/completions", COMPLETION, upgrade)
    with connect(server) as sock:
        sock.sendall(HEALTH.replace(b"\r\n\r\n", f"\r\n{upgrade}\r\n".encode()))
        assert read_response(sock)[0] == 200
        sock.sendall(request + request + HEALTH)
        for expected in (b"text_completion", b"text_completion", b"ok"):
            status, body = read_response(sock)
            assert status == 200, body
            assert expected in body


@pytest.mark.parametrize("upgrade", UPGRADES, ids=["h2c", "websocket"])
def test_an_upgrade_with_a_body_in_chunks(server: ServerProcess, upgrade: str) -> None:
    head = post("/tokenize", b"", f"Transfer-Encoding: chunked\r\n{upgrade}")
    head = head.replace(b"Content-Length: 0\r\n", b"")
    with connect(server) as sock:
        for piece in (head[:50], head[50:], b'c\r\n{"prompt": "', b'\r\n4\r\nHi"}\r\n0\r\n\r\n'):
            sock.sendall(piece)
            time.sleep(0.02)
        assert read_response(sock)[0] == 200
        sock.sendall(HEALTH)
        assert read_response(sock)[0] == 200


def test_an_upgrade_of_a_client_that_waits_to_be_asked_for_the_body(server: ServerProcess) -> None:
    request = post("/tokenize", {"prompt": "Hi"}, UPGRADES[0] + "Expect: 100-continue\r\n")
    head, _, body = request.partition(b"\r\n\r\n")
    with connect(server) as sock:
        sock.sendall(head + b"\r\n\r\n")
        asked = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert sock.recv(len(asked), socket.MSG_WAITALL) == asked
        sock.sendall(body)
        assert read_response(sock)[0] == 200


def test_http_2_by_prior_knowledge_is_refused(server: ServerProcess) -> None:
    with connect(server) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        assert read_error(sock) == (400, None)
        assert is_closed(sock)


# HTTP/1.0


@pytest.mark.parametrize("headers", ["", "Connection: keep-alive\r\nExpect: 100-continue\r\n"])
def test_a_stream_to_http_1_0_has_no_chunks(server: ServerProcess, headers: str) -> None:
    """Nor an interim answer before it; it ends where the connection does."""
    with connect(server) as sock:
        sock.sendall(spoken_in(b"HTTP/1.0", post("/v1/completions", STREAM, headers)))
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    events = body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: ") for event in events[:-1])


def test_an_answer_to_http_1_0_tells_its_length_where_it_has_one(server: ServerProcess) -> None:
    with connect(server) as sock:
        sock.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower()


# Half-closed connections


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("request_fields", [COMPLETION, STREAM], ids=["whole", "stream"])
def test_a_half_closed_client_gets_its_answer(
    server: ServerProcess, version: bytes, request_fields: dict[str, object]
) -> None:
    with connect(server) as sock:
        sock.sendall(spoken_in(version, post("/v1/completions", request_fields)))
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"text_completion" in answer
    assert answer.rstrip().endswith((b"}", b"data: [DONE]", b"0"))


def test_all_that_a_half_closed_client_asked_for_is_answered(server: ServerProcess) -> None:
    with connect(server) as sock:
        sock.sendall(post("/v1/completions", COMPLETION) + HEALTH + post("/tokenize", b"{}")[:-1])
        sock.shutdown(socket.SHUT_WR)
        assert b"text_completion" in read_response(sock)[1]
        assert read_response(sock)[0] == 200
        assert is_closed(sock), "but not what is not complete"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("is_half_closed_before", [True, False])
def test_a_client_that_is_gone_frees_its_request(
    server: ServerProcess, version: bytes, stream: bool, is_half_closed_before: bool
) -> None:
    """Which looks like one that is half-closed, and may have been."""
    with connect(server) as sock:
        request = long_request(stream=stream)
        sock.sendall(spoken_in(version, post("/v1/completions", request)))
        if is_half_closed_before:
            sock.shutdown(socket.SHUT_WR)
        server.wait_for_metric("num_requests_running", 1)
    server.wait_for_metric("num_requests_running", 0)


def pass_on(source: socket.socket, target: socket.socket) -> None:
    """Send all bytes, and then their end; hang up if the server takes no more."""
    try:
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()


def test_a_client_that_is_gone_behind_a_proxy_frees_its_request(server: ServerProcess) -> None:
    """The proxy notices no sooner than when it cannot pass something on."""
    with contextlib.ExitStack() as stack, connect(server) as backend:
        client, frontend = loopback_pair()
        stack.enter_context(frontend)
        for source, target in (frontend, backend), (backend, frontend):
            thread = threading.Thread(target=pass_on, args=(source, target))
            thread.start()
            stack.callback(thread.join)
        with client:
            client.sendall(post("/v1/completions", long_request(stream=False)))
            server.wait_for_metric("num_requests_running", 1)
        server.wait_for_metric("num_requests_running", 0)


def loopback_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


def test_a_client_that_is_gone_frees_all_it_asked_for(server: ServerProcess) -> None:
    num_logged = len(server.log.read_text())
    with connect(server) as sock:
        sock.sendall(post("/v1/completions", long_request()) + HEALTH)
        server.wait_for_metric("num_requests_running", 1)
    server.wait_for_metric("num_requests_running", 0)
    assert "Traceback" not in server.log.read_text()[num_logged:]


def test_accesses_are_logged_with_their_request_and_without_probes(server: ServerProcess) -> None:
    num_logged = len(server.log.read_text())
    for path in ("/health", "/metrics", "/load", "/ping?from=prober"):
        server.http.get(path, headers={"X-Request-Id": "a-probe"}).raise_for_status()
    server.http.get("/v1/models?key=secret", headers={"X-Request-Id": "an-access"})
    log = server.log.read_text()[num_logged:]
    (line,) = (line for line in log.splitlines() if line.endswith("[an-access]"))
    assert re.match(r"\d{4}-\d\d-\d\dT[\d:.]{12}Z INFO uvicorn.access: ", line)
    assert '"GET /v1/models HTTP/1.1" 200' in line
    assert "a-probe" not in log
    assert "secret" not in log


# Pipelines


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"])
@pytest.mark.parametrize("pause_s", [0, 0.05], ids=["at once", "later"])
def test_what_comes_before_garbage_is_answered(
    server: ServerProcess, garbage: bytes, pause_s: float
) -> None:
    with connect(server) as sock:
        sock.sendall(post("/v1/completions", STREAM) + (b"" if pause_s else garbage))
        if pause_s:
            time.sleep(pause_s)
            sock.sendall(garbage)
            sock.sendall(garbage)
        status, body = read_response(sock)
        assert status == 200
        assert body.count(b"\n\n") == COMPLETION["max_tokens"] + 1
        assert body.endswith(b"data: [DONE]\n\n")
        assert read_error(sock) == (400, None)
        assert is_closed(sock)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_broken_body_is_refused(server: ServerProcess, version: bytes) -> None:
    num_logged = len(server.log.read_text())
    broken = post("/tokenize", b"", "Transfer-Encoding: chunked\r\n") + b"no length\r\n"
    with connect(server) as sock:
        sock.sendall(spoken_in(version, broken.replace(b"Content-Length: 0\r\n", b"")))
        assert read_error(sock) == (400, None)
        assert is_closed(sock)
    assert "Traceback" not in server.log.read_text()[num_logged:]


def test_a_broken_body_does_not_cut_what_comes_before_it(server: ServerProcess) -> None:
    broken = post("/tokenize", b"", "Transfer-Encoding: chunked\r\n")
    broken = broken.replace(b"Content-Length: 0\r\n", b"") + b"no length\r\n"
    with connect(server) as sock:
        sock.sendall(post("/v1/completions", STREAM) + broken)
        assert read_response(sock)[1].endswith(b"data: [DONE]\n\n")
        assert read_error(sock) == (400, None)
        assert is_closed(sock)


# HEAD


def test_what_can_be_read_has_a_head(server: ServerProcess) -> None:
    """Each path that takes GET, also where its answer has no end."""
    paths = server.http.get("/openapi.json").json()["paths"]
    readable = [path for path, operations in paths.items() if "get" in operations]
    assert {"/v1/models", "/health", "/metrics"} <= set(readable)
    for path in [*readable, "/ping", "/dashboard", "/dashboard/events", "/openapi.json"]:
        path = path.replace("{response_id}", "resp_1").replace("{model}", "nobody")
        with server.http.stream("GET", path) as got:
            head = server.http.head(path)
        assert (head.status_code, head.content) == (got.status_code, b""), path
        assert head.headers.get("Content-Type") == got.headers.get("Content-Type"), path
    head = server.http.head("/v1/models")
    assert int(head.headers["Content-Length"]) == len(server.http.get("/v1/models").content)
    assert server.http.options("/v1/models").headers["Allow"] == "GET, HEAD"
    assert server.http.head("/v1/completions").status_code == 405
    with connect(server) as sock:  # nothing comes after a head but the next answer
        sock.sendall(HEALTH.replace(b"GET", b"HEAD").replace(b"/health", b"/dashboard/events"))
        sock.sendall(HEALTH)
        received = b""
        while received.count(b"\r\n\r\n") < 2:
            received += sock.recv(2**16)
        assert received.count(b"HTTP/1.1 200") == 2
        assert received.split(b"\r\n\r\n")[1].startswith(b"HTTP/1.1 200")
