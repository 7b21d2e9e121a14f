"""A client that goes away frees what it held."""

import httpx
import pytest

from tests.server.launch import ServerProcess, long_request


def test_closed_stream_frees_its_request(server: ServerProcess) -> None:
    aborted = server.metric("request_success_total", finished_reason="abort")
    with server.http.stream("POST", "/v1/completions", json=long_request(n=2)) as response:
        lines = response.iter_lines()  # without its name it is collected, which disconnects
        next(lines)
        server.wait_for_metric("num_requests_running", 2)
    server.wait_for_metric("num_requests_running", 0)
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.metric("request_success_total", finished_reason="abort") == aborted + 2


def test_stream_that_is_not_read_any_more(server: ServerProcess) -> None:
    """The client's process dies with the answer unread in its socket."""
    client = httpx.Client(base_url=server.url)
    request = client.build_request("POST", "/v1/completions", json=long_request())
    client.send(request, stream=True)
    server.wait_for_metric("num_requests_running", 1)
    client.close()
    server.wait_for_metric("num_requests_running", 0)


@pytest.mark.parametrize("prompts", ["Once", ["Once", "upon", "a time"]])
def test_client_that_does_not_wait_for_a_whole_answer(
    server: ServerProcess, prompts: str | list[str]
) -> None:
    request = long_request(prompt=prompts, stream=False)
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=request, timeout=0.5)
    server.wait_for_metric("num_requests_running", 0)
    assert server.metric("kv_cache_usage_perc") == 0


def test_client_that_leaves_during_prefill(server: ServerProcess) -> None:
    request = long_request(prompt=[1000 + i for i in range(6000)], stream=False)
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=request, timeout=0.3)
    server.wait_for_metric("num_requests_running", 0)
    assert server.metric("kv_cache_usage_perc") == 0
