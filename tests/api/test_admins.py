"""Admins may change a server's settings, and see the requests of all its clients."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.api.config import ServerConfig
from legato.api.http.access import Admins, HostNames
from legato.api.http.errors import ApiError
from tests.api.launch import ServerProcess, running_server
from tests.profiles import examples

FOR_ADMINS = {
    ("PATCH", "/settings"), ("POST", "/trace/start"), ("POST", "/trace/stop"),
    ("GET", "/dashboard/events"), ("POST", "/reset_prefix_cache"), ("GET", "/slots"),
}  # fmt: skip
OPEN = {
    ("GET", path) for path in ("/", "/dashboard", "/docs", "/health", "/metrics", "/openapi.json",
                               "/version", "/livez", "/readyz", "/startupz")
}  # fmt: skip
FOR_CLIENTS = {
    ("GET", "/settings"), ("GET", "/server_info"), ("GET", "/get_server_info"),
    ("GET", "/model_info"), ("GET", "/get_model_info"), ("GET", "/kv_event_sources"),
    ("GET", "/tokenizer_info"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/v1/models"), ("GET", "/v1/models/{model:path}"),
    ("POST", "/v1/completions"), ("POST", "/v1/completions/render"),
    ("POST", "/v1/chat/completions"), ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/messages/render"), ("POST", "/v1/responses/render"),
    ("POST", "/v1/embeddings"), ("POST", "/v1/score"), ("POST", "/score"), ("POST", "/v1/rerank"),
    ("POST", "/rerank"), ("POST", "/inference/v1/generate"), ("GET", "/load"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/responses"), ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"), ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("GET", "/props"), ("POST", "/apply-template"), ("GET", "/api/version"),
    ("GET", "/api/tags"), ("GET", "/api/ps"), ("POST", "/api/show"), ("POST", "/api/pull"),
    ("POST", "/api/chat"), ("POST", "/api/generate"), ("POST", "/api/embed"),
    ("POST", "/api/embeddings"),
}  # fmt: skip
"""Of stored responses, each tenant has its own."""
TENANT, ADMIN = {"Authorization": "Bearer sk-ops"}, {"x-api-key": "sk-root"}
PROXIED = [
    {"X-Forwarded-For": "127.0.0.1"}, {"Forwarded": "for=127.0.0.1"}, {"Via": "1.1 proxy"},
    {"X-Real-IP": "::1"}, {"X-Forwarded-Host": "localhost"},
]  # fmt: skip
KEYS, ADMIN_KEY = ("--api-key", "ops=sk-ops,lab=sk-lab"), ("--admin-api-key", "sk-root,sk-root-2")


@contextmanager
def open_server(folder: Path, *flags: str) -> Iterator[ServerProcess]:
    with running_server(folder, "--enable-tokenizer-info-endpoint", *flags) as server:
        yield server


def status(http: httpx.Client, method: str, path: str, headers: dict[str, str]) -> int:
    """Of an answer whose body may go on for ever; no body asks for anything to be done."""
    path = path.replace("{model:path}", "x").replace("{response_id}", "x")
    with http.stream(method, path, headers=headers, json=[] if method != "GET" else None) as answer:
        return answer.status_code


def is_let_in(http: httpx.Client, method: str, path: str, headers: dict[str, str]) -> bool:
    return status(http, method, path, headers) not in (401, 403)


def check_refused(answer: httpx.Response, told: int, code: str, flag: str) -> None:
    assert answer.status_code == told
    error = answer.json()["error"]
    assert error["code"] == code
    assert flag in error["message"]


def test_each_endpoint_is_for_somebody(tmp_path: Path) -> None:
    with open_server(tmp_path, *KEYS, *ADMIN_KEY) as server:
        http = server.http
        operations = {
            (method.upper(), path.replace("{model}", "{model:path}"))
            for path, methods in http.get("/openapi.json").json()["paths"].items()
            for method in methods
        }
        hidden = {("GET", "/dashboard/events"), *OPEN}
        assert operations - hidden == (FOR_CLIENTS | FOR_ADMINS) - hidden
        proxies = cycle(PROXIED)
        for endpoint in sorted(OPEN | FOR_CLIENTS | FOR_ADMINS):
            is_open, is_clients = endpoint in OPEN, endpoint not in FOR_ADMINS
            let_in = [is_let_in(http, *endpoint, headers) for headers in ({}, TENANT, ADMIN)]
            assert let_in == [is_open, is_clients, True], endpoint
            # A key is as good behind a proxy.
            assert is_let_in(http, *endpoint, next(proxies) | ADMIN)
        refused = http.patch("/settings", json={}, headers=TENANT)
        check_refused(refused, 403, "admin_key_required", "--admin-api-key")
        changed = http.patch("/settings", json={"itl_slo_s": 5}, headers=ADMIN)
        assert changed.json()["asked"]["itl_slo_s"] == 5.0
        other = {"Authorization": "Bearer sk-root-2"}
        assert http.post("/trace/start", json={}, headers=other).status_code == 200
        done = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}, headers=other)
        assert done.status_code == 200
        trace = http.post("/trace/stop", headers=ADMIN)
        assert done.headers["x-request-id"] in trace.text
        assert "sk-root" not in server.log.read_text()


def test_without_an_admin_key_clients_of_this_machine_are_admins(tmp_path: Path) -> None:
    with open_server(tmp_path, *KEYS, "--host", "0.0.0.0") as server:
        port = httpx.URL(server.url).port
        near = httpx.Client(base_url=f"http://127.0.0.1:{port}")
        for endpoint in sorted(FOR_ADMINS):
            assert status(near, *endpoint, {}) == 401
            assert is_let_in(near, *endpoint, TENANT)
            for headers in PROXIED:
                assert status(near, *endpoint, {**headers, **TENANT}) == 403
        answer = near.patch("/settings", json={}, headers={**TENANT, **PROXIED[0]})
        check_refused(answer, 403, "from_this_machine_only", "--admin-api-key")
        for address in own_addresses():
            with httpx.Client(base_url=f"http://{address}:{port}") as far:
                assert far.get("/settings", headers=TENANT).status_code == 200
                answer = far.patch("/settings", json={}, headers=TENANT)
                check_refused(answer, 403, "from_this_machine_only", "--admin-api-key")


def test_an_admin_key_leaves_the_api_open(tmp_path: Path) -> None:
    with open_server(tmp_path, *ADMIN_KEY) as server:
        http = server.http
        for endpoint in sorted(FOR_CLIENTS | FOR_ADMINS):
            is_clients = endpoint not in FOR_ADMINS
            let_in = [is_let_in(http, *endpoint, headers) for headers in ({}, TENANT, ADMIN)]
            assert let_in == [is_clients, is_clients, True], endpoint
        refused = http.patch("/settings", json={})
        check_refused(refused, 401, "admin_key_required", "--admin-api-key")
        assert refused.headers["WWW-Authenticate"] == "Bearer"


def own_addresses() -> list[str]:
    """By which this machine reaches itself without its loopback interface."""
    return [
        found.address
        for addresses in psutil.net_if_addrs().values()
        for found in addresses
        if found.family == socket.AF_INET and not found.address.startswith("127.")
    ]


def may(config: ServerConfig, peer: Any, headers: dict[str, str]) -> bool:
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    try:
        Admins(config, HostNames(config)).check({"type": "http", "client": peer, "headers": raw})
    except ApiError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "is_near"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("0.0.0.0", False), ("", False),
        ("unix:/run/x", False),
    ],
)  # fmt: skip
def test_what_is_this_machine(host: str, is_near: bool) -> None:
    assert may(ServerConfig(), (host, 1), {"Host": "localhost"}) is is_near
    assert not may(ServerConfig(), None, {"Host": "localhost"})


@given(
    headers=st.dictionaries(
        st.sampled_from(
            ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP", "Host", "Origin", "x-api-key"]
        ),
        st.sampled_from(["127.0.0.1", "localhost", "for=127.0.0.1", "::1", "sk-root", "sk-ops"]),
    ),
    peer=st.sampled_from(["10.0.0.1", "2001:db8::1", "192.168.0.2"]),
    has_keys=st.booleans(),
)
@examples(200)
def test_no_header_makes_another_machine_this_one(
    headers: dict[str, str], peer: str, has_keys: bool
) -> None:
    keys = ("sk-ops",) if has_keys else ()
    assert not may(ServerConfig(api_keys=keys), (peer, 1), headers)


def test_a_page_that_has_another_name_is_no_admin_where_any_name_will_do() -> None:
    near, config = ("127.0.0.1", 1), ServerConfig(allowed_hosts=("*", "legato.example"))
    assert may(config, near, {"Host": "localhost:8000"})
    assert may(config, near, {"Host": "legato.example"})
    assert not may(config, near, {"Host": "evil.example"})
