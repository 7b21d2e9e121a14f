"""A client that goes away frees what it held."""

from typing import Any

import httpx
import pytest

from tests.api.launch import ServerProcess, long_request
from tests.api.wire import connect, post


def test_closed_stream_frees_its_request(server: ServerProcess) -> None:
    aborted = server.metric("request_success_total", finished_reason="abort")
    with server.http.stream("POST", "/v1/completions", json=long_request(n=2)) as response:
        lines = response.iter_lines()  # without its name it is collected, which disconnects
        next(lines)
        server.wait_for_metric("num_requests_running", 2)
    server.wait_for_metric("num_requests_running", 0)
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.metric("request_success_total", finished_reason="abort") == aborted + 1


def test_stream_that_is_not_read_any_more(server: ServerProcess) -> None:
    """The client's process dies with the answer unread in its socket."""
    client = httpx.Client(base_url=server.url)
    request = client.build_request("POST", "/v1/completions", json=long_request())
    client.send(request, stream=True)
    server.wait_for_metric("num_requests_running", 1)
    client.close()
    server.wait_for_metric("num_requests_running", 0)


@pytest.mark.parametrize(("prompt", "num_requests"), [("Once", 1), (["Once", "upon", "a time"], 3)])
def test_client_that_does_not_wait_for_a_whole_answer(
    server: ServerProcess, prompt: str | list[str], num_requests: int
) -> None:
    leave_while_running(server, num_requests, prompt=prompt)


def test_client_that_leaves_during_prefill(server: ServerProcess) -> None:
    leave_while_running(server, 1, prompt=[1000 + i for i in range(6000)])


def leave_while_running(server: ServerProcess, num_requests: int, **fields: Any) -> None:
    with connect(server) as sock:
        sock.sendall(post("/v1/completions", long_request(**fields, stream=False)))
        server.wait_for_metric("num_requests_running", num_requests)
    server.wait_for_metric("num_requests_running", 0)
    assert server.metric("kv_cache_usage_perc") == 0
