"""Limits that an operator may set: keys, sizes of bodies, numbers of waiting requests."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from legato.api.config import ServerConfig
from tests.api.launch import MODEL, ServerProcess, long_request, running_server
from tests.api.wire import connect

SECRET = "sk-not-to-be-seen-\u00fc"
FLAGS = (
    "--api-key", "one,two", "--api-key", "three", "--max-body-size", "64K",
    "--max-num-seqs", "1", "--max-waiting", "1", "--served-model-name", "small/model", "small",
    "--trust-request-chat-template", "--api-key", SECRET, "--log-level", "debug",
    "--max-completions", "6", "--allowed-origins", "https://app.example",
    "--allowed-host", "api.example",
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


@pytest.mark.parametrize("key", ["one", "two", "three", SECRET])
def test_each_key_opens(limited: ServerProcess, key: str) -> None:
    headers = {"Authorization": b"Bearer " + key.encode()}
    models = limited.http.get("/v1/models", headers=headers).json()["data"]
    assert [model["id"] for model in models] == ["small/model", "small"]


def test_openai_client_with_a_key(limited: ServerProcess) -> None:
    model = limited.openai(api_key="two").models.retrieve("small/model")
    assert model.model_extra is not None
    assert model.model_extra["root"] == MODEL


def test_each_name_is_the_model_and_the_first_is_told(limited: ServerProcess) -> None:
    client = limited.openai(api_key="one")
    for name in ("small/model", "small"):
        completion = client.completions.create(model=name, prompt="Hi", max_tokens=1)
        assert completion.model == "small/model"
        assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError, match="this server has 'small/model' or 'small'"):
        client.completions.create(model=MODEL, prompt="Hi", max_tokens=1)


@pytest.mark.parametrize(
    ("trailers", "status"),
    [
        ("Authorization: Bearer two", 401),
        ("x-api-key: two", 401),
        ("Authorization: Bearer four", 200),
        ("Host: evil.example", 200),
        ("Origin: https://evil.example", 200),
        ("Content-Encoding: br", 200),
        ("Content-Type: text/plain", 200),
        ("X-Request-Id: late", 200),
        ("Expect: 100-continue", 200),
    ],
)
@pytest.mark.parametrize("upgrade", ["", "Connection: Upgrade\r\nUpgrade: h2c\r\n"])
def test_trailers_count_for_nothing(
    limited: ServerProcess, trailers: str, status: int, upgrade: str
) -> None:
    """Nor where they come with the head, before the request is looked at."""
    key = "Authorization: Bearer two\r\n" if status == 200 else ""
    head = (
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Transfer-Encoding: chunked\r\n{key}{upgrade}\r\n"
    )
    with connect(limited) as sock:
        for _ in range(2):
            sock.sendall(f'{head}f\r\n{{"prompt":"Hi"}}\r\n0\r\n{trailers}\r\n\r\n'.encode())
            answer = http.client.HTTPResponse(sock)
            answer.begin()
            assert answer.status == status
            assert answer.headers["X-Request-Id"] != "late"
            answer.read()


def test_queries_come_into_no_log(limited: ServerProcess) -> None:
    for path in ("/version", "/v1/models", "/no/such/path"):
        limited.http.get(path, params={"api_key": "sk-in-a-query", "text": "private?words"})
    log = limited.log.read_text()
    assert '"GET /v1/models HTTP/1.1" 401' in log or '"GET /v1/models HTTP/1.1" 200' in log
    assert "sk-in-a-query" not in log
    assert "private" not in log


def test_keys_come_into_no_log(limited: ServerProcess) -> None:
    for header in (f"Bearer {SECRET}", f"bearer {SECRET}", SECRET, f"Bearer {SECRET}x"):
        headers = {"Authorization": header.encode()}
        limited.http.post("/v1/completions", content=b"{", headers=headers)
    log = limited.log.read_text()
    assert "/v1/completions" in log, "requests are logged at this level"
    assert SECRET not in log
    assert SECRET.encode("unicode_escape").decode() not in log
    assert SECRET not in repr(ServerConfig(api_keys=(SECRET,)))


def test_probes_and_the_empty_dashboard_need_no_key(limited: ServerProcess) -> None:
    for path in ("/health", "/version", "/metrics", "/dashboard", "/dashboard/main.js"):
        assert limited.http.get(path).status_code == 200


def test_what_the_dashboard_shows_and_changes_needs_one(limited: ServerProcess) -> None:
    for path in ("/dashboard/events", "/settings"):
        assert limited.http.get(path).status_code == 401
    assert limited.http.patch("/settings", json={"itl_slo_s": 1}).status_code == 401
    assert limited.http.get("/settings", headers=KEY).json()["asked"]["itl_slo_s"] == "auto"


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


def test_completions_of_one_request(limited: ServerProcess) -> None:
    for fields, param in ({"prompt": ["Hi"] * 7}, "prompt"), ({"prompt": ["Hi"] * 4, "n": 2}, "n"):
        response = limited.http.post("/v1/completions", json=fields, headers=KEY)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert "--max-completions" in response.json()["error"]["message"]


def test_only_allowed_origins_may_call_from_a_browser(limited: ServerProcess) -> None:
    def preflight(origin: str) -> httpx.Headers:
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        return limited.http.options("/v1/chat/completions", headers=asked).headers

    allowed = preflight("https://app.example")
    assert allowed["Access-Control-Allow-Origin"] == "https://app.example"
    assert "authorization" in allowed["Access-Control-Allow-Headers"]
    assert "Access-Control-Allow-Origin" not in preflight("https://other.example")
    answer = limited.http.get("/health", headers={"Origin": "https://app.example"})
    assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
    answer = limited.http.get("/health", headers={"Origin": "https://other.example"})
    assert answer.status_code == 403


def test_only_allowed_hosts_are_answered_once_there_are_any(limited: ServerProcess) -> None:
    for host, status in ("api.example", 200), ("127.0.0.1", 200), ("other.example", 403):
        answer = limited.http.get("/v1/models", headers={**KEY, "Host": host})
        assert answer.status_code == status


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(messages[0]) }}",
        "{{ cycler.__init__.__globals__.os.system('touch escaped') }}",
        "{% for i in range(1000000) %}{{ i }}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_are_sandboxed(limited: ServerProcess, template: str) -> None:
    fields = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": template}
    response = limited.http.post("/tokenize", json=fields, headers=KEY)
    assert response.status_code == 400, response.text
    assert "the chat template failed" in response.json()["error"]["message"]
    assert not Path("escaped").exists()


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
