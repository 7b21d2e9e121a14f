"""What an operator may limit: who is served, how large a body is, how many may wait."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import openai
import pytest

from tests.server.launch import MODEL, ServerProcess, long_request, running_server

FLAGS = (
    "--api-key", "one,two", "--api-key", "three", "--max-body-size", "64K",
    "--max-num-seqs", "1", "--max-waiting", "1", "--served-model-name", "small/model",
    "--trust-request-chat-template",
)  # fmt: skip
KEY = {"Authorization": "Bearer two"}


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("limited"), *FLAGS) as process:
        yield process


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer four"}, {"Authorization": "Basic one"},
     {"Authorization": "one"}, {"Authorization": "Bearer one,two"}, {"Authorization": "Bearer"}],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_wrong_key(limited: ServerProcess, path: str, headers: dict[str, str]) -> None:
    response = limited.http.post(path, json={"prompt": "Hi"}, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("key", ["one", "two", "three"])
def test_each_key_opens(limited: ServerProcess, key: str) -> None:
    client = limited.openai(api_key=key)
    models = client.models.list().data
    assert [model.id for model in models] == ["small/model"]
    assert client.models.retrieve("small/model").model_extra["root"] == MODEL  # type: ignore[index]


def test_probes_need_no_key(limited: ServerProcess) -> None:
    for path in ("/health", "/version", "/metrics"):
        assert limited.http.get(path).status_code == 200


def test_client_sees_authentication_error(limited: ServerProcess) -> None:
    with pytest.raises(openai.AuthenticationError):
        limited.openai(api_key="four").models.list()


def test_body_limit(limited: ServerProcess) -> None:
    def stream() -> Iterator[bytes]:
        for _ in range(70):
            yield b"x" * 1024

    for content in (b"x" * 70_000, stream()):
        response = limited.http.post(
            "/v1/completions",
            content=content,
            headers={**KEY, "Content-Type": "application/json"},
        )
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"


def test_templates_from_requests_when_trusted(limited: ServerProcess) -> None:
    def tokens(**fields: object) -> list[int]:
        response = limited.http.post("/tokenize", json=fields, headers=KEY)
        assert response.status_code == 200, response.text
        ids: list[int] = response.json()["tokens"]
        return ids

    rendered = tokens(
        messages=[{"role": "user", "content": "Hi"}],
        chat_template="{{ greeting }}, {{ messages[0].content }}",
        chat_template_kwargs={"greeting": "Hello"},
    )
    assert rendered == tokens(prompt="Hello, Hi", add_special_tokens=False)


def test_flood_is_refused_and_counted(limited: ServerProcess) -> None:
    """One runs, one waits, the rest is told to come back."""
    with ExitStack() as stack:
        running = stack.enter_context(
            limited.http.stream("POST", "/v1/completions", json=long_request(), headers=KEY)
        )
        assert running.status_code == 200
        waiting = threading.Thread(target=_start_and_leave, args=(limited,))
        waiting.start()
        limited.wait_for_metric("num_requests_waiting", 1)
        for _ in range(3):
            refused = limited.http.post("/v1/completions", json={"prompt": "Hi"}, headers=KEY)
            assert refused.status_code == 429
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError):
            limited.openai("one").completions.create(model="small/model", prompt="Hi", stream=True)
    waiting.join()
    assert limited.metric("request_errors_total", status="429") == 4
    assert limited.metric("request_success_total", finished_reason="refused") == 4
    limited.wait_for_metric("num_requests_running", 0)
    assert limited.metric("num_requests_waiting") == 0


def _start_and_leave(limited: ServerProcess) -> None:
    with (
        httpx.Client(base_url=limited.url, headers=KEY, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=long_request()) as response,
    ):
        assert response.status_code == 200
