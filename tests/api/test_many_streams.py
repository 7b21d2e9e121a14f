"""Streams whose tokens are written in one pass: each gets its own beside any neighbours."""

import json
import socket
import struct
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.api.launch import ServerProcess, long_request
from tests.api.servers import FEW_UNREAD, GUARDED, Servers
from tests.api.wire import connect, post, read_response

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MORE_THAN_SOCKETS_HOLD = 350_000
"""Bytes: what the kernel may keep of an answer, which Linux doubles, and 64 KiB more."""
LARGE_EVENTS = {
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
}


@pytest.fixture(scope="module")
def impatient(servers: Servers) -> ServerProcess:
    return servers.get(*GUARDED)


def greedy(index: int) -> tuple[str, dict[str, Any]]:
    """One of many requests. No two are alike."""
    fields = {"temperature": 0, "max_tokens": 6 + index % 7, "n": 1 + index % 2}
    if index % 2:
        return CHAT, {**fields, "messages": [{"role": "user", "content": f"Count from {index}."}]}
    stop = [[" 9", "1"], []][index % 4 // 2]
    return COMPLETIONS, {**fields, "prompt": f"{index}, {index + 1}, ", "stop": stop, "echo": True}


def whole_texts(server: ServerProcess, path: str, fields: dict[str, Any]) -> dict[int, str]:
    answer = server.http.post(path, json=fields).json()
    return {c["index"]: c.get("text") or c["message"]["content"] for c in answer["choices"]}


def events(body: bytes) -> list[dict[str, Any]]:
    *data, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in data]


def streamed_texts(body: bytes) -> dict[int, str]:
    texts: defaultdict[int, str] = defaultdict(str)
    chunks = events(body)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content", "")
    return dict(texts)


def read_stream(sock: socket.socket) -> bytes:
    status, body = read_response(sock)
    assert status == 200
    return body


def test_each_stream_is_its_own_answer(server: ServerProcess) -> None:
    """On connections that are used again: each answer's chunks must end where they say."""
    requests = [greedy(index) for index in range(12)]

    def stream(index: int) -> list[dict[int, str]]:
        with connect(server) as sock:
            texts = []
            for path, fields in (requests[index], requests[-index]):
                sock.sendall(post(path, {**fields, "stream": True}))
                texts.append(streamed_texts(read_stream(sock)))
            return texts

    with ThreadPoolExecutor(len(requests)) as pool:
        expected = list(pool.map(lambda request: whole_texts(server, *request), requests))
        streamed = list(pool.map(stream, range(len(requests))))
    assert streamed == [[expected[i], expected[-i]] for i in range(len(requests))]


def test_pipelined_streams_come_one_after_the_other(server: ServerProcess) -> None:
    requests = [greedy(index) for index in range(3)]
    with connect(server) as sock:
        sock.sendall(b"".join(post(path, {**fields, "stream": True}) for path, fields in requests))
        streamed = [streamed_texts(read_stream(sock)) for _ in requests]
    assert streamed == [whole_texts(server, *request) for request in requests]


def test_clients_that_leave_take_nothing_from_those_that_stay(server: ServerProcess) -> None:
    requests = [greedy(index) for index in range(4)]
    expected = [whole_texts(server, *request) for request in requests]
    with ExitStack() as stack:
        staying = [stack.enter_context(connect(server)) for _ in requests]
        leaving = [connect(server) for _ in requests]
        for sock, (path, fields) in zip(staying, requests, strict=True):
            leaver = leaving.pop()
            leaver.sendall(post(COMPLETIONS, long_request()))
            assert leaver.recv(1) == b"H"
            sock.sendall(post(path, {**fields, "stream": True}))
            # A reset, which may reach the server at any moment.
            leaver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaver.close()
        assert [streamed_texts(read_stream(sock)) for sock in staying] == expected
    server.wait_for_metric("num_requests_running", 0)
    assert server.metric("kv_cache_usage_perc") == 0


def test_a_client_that_reads_late_gets_all_of_its_stream(server: ServerProcess) -> None:
    """Its tokens wait first in sockets, then for it alone."""
    fields = {**LARGE_EVENTS, "max_tokens": 32}
    expected = whole_texts(server, CHAT, fields)
    ended = server.metric("request_success_total", finished_reason="length")
    with connect(server, receive_buffer_bytes=4096) as late:
        late.sendall(post(CHAT, {**fields, "n": 8, "stream": True}))
        server.wait_for_metric("request_success_total", ended + 1, finished_reason="length")
        body = read_stream(late)
    assert len(body) > MORE_THAN_SOCKETS_HOLD
    assert streamed_texts(body) == dict.fromkeys(range(8), expected[0])


def test_a_client_that_does_not_read_is_dropped_and_holds_up_nobody(
    impatient: ServerProcess,
) -> None:
    with connect(impatient, receive_buffer_bytes=4096) as slow:
        slow.sendall(post(CHAT, {**LARGE_EVENTS, "max_tokens": 2000, "stream": True}))
        impatient.wait_for_metric("num_requests_running", 1)
        with connect(impatient) as other:
            other.sendall(post(COMPLETIONS, long_request(max_tokens=60)))
            assert len(events(read_stream(other))) == 60
        impatient.wait_for_metric("num_requests_running", 0)
        *chunks, last = events(read_stream(slow))
    assert last["error"]["code"] == "slow_reader"
    assert f"{FEW_UNREAD} of its tokens" in last["error"]["message"]
    num_generated = impatient.metric("generation_tokens_total") - 60
    assert len(chunks) == num_generated - FEW_UNREAD - 1, "what waited for it was dropped"
    assert len(chunks) < 2000
    assert impatient.metric("request_success_total", finished_reason="error") == 1
