"""What a server shows of itself where nothing was asked for, and to whom."""

import socket
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from legato.api.config import ServerConfig
from legato.api.http.access import HostNames
from tests.api.launch import ServerProcess

READING_AND_CHANGING = [
    ("GET", "/settings"), ("GET", "/metrics"), ("GET", "/dashboard/events"), ("POST", "/tokenize"),
    ("PATCH", "/settings"), ("POST", "/v1/completions"), ("POST", "/trace/start"),
    ("POST", "/trace/stop"), ("OPTIONS", "/settings"), ("GET", "/nowhere"),
]  # fmt: skip


def test_one_socket_listens_and_the_processes_share_a_nameless_one(server: ServerProcess) -> None:
    processes = (psutil.Process(server.process.pid), server.engine)
    sockets = [found for process in processes for found in process.net_connections("all")]
    listening = [found.laddr for found in sockets if found.status == psutil.CONN_LISTEN]
    assert listening == [("127.0.0.1", urlsplit(server.url).port)]
    assert {found.laddr for found in sockets if found.family == socket.AF_UNIX} == {""}


def test_browsers_are_not_let_in(http: httpx.Client) -> None:
    """CORS is off, and what a form can send is no JSON."""
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    response = http.options("/v1/completions", headers=asked)
    assert response.status_code == 403
    assert not [name for name in response.headers if name.startswith("access-control")]
    for content_type in (None, "text/plain", "application/x-www-form-urlencoded"):
        headers = {"Content-Type": content_type} if content_type else {}
        response = http.post("/v1/completions", content=b'{"prompt": "Hi"}', headers=headers)
        assert response.status_code == 400


def check_refused(response: httpx.Response, code: str, flag: str) -> None:
    assert response.status_code == 403
    error = response.json()["error"]
    assert error["code"] == code
    assert flag in error["message"]


@pytest.mark.parametrize(("method", "path"), READING_AND_CHANGING)
def test_a_name_that_is_not_the_servers_is_not_answered(
    http: httpx.Client, method: str, path: str
) -> None:
    """As that of a page whose owner lets it point here, which is then of one origin with it."""
    port = urlsplit(str(http.base_url)).port
    own = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
    response = http.request(method, path, headers={**own, "Sec-Fetch-Site": "same-origin"})
    check_refused(response, "host_not_allowed", "--allowed-host")


@pytest.mark.parametrize(("method", "path"), READING_AND_CHANGING)
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Dest": "image"},
    ],
    ids=["other", "null", "other port", "cross-site", "image"],
)
def test_pages_of_other_origins_are_not_answered(
    http: httpx.Client, method: str, path: str, headers: dict[str, str]
) -> None:
    response = http.request(method, path, headers=headers)
    check_refused(response, "origin_not_allowed", "--allowed-origins")


def test_what_pages_may_do(http: httpx.Client) -> None:
    url = str(http.base_url).rstrip("/")
    port = urlsplit(url).port
    proxied = {"Host": "localhost", "Origin": "https://localhost"}
    for headers in (
        {"Origin": url},
        {"Origin": url.replace("127.0.0.1", "localhost"), "Host": f"localhost:{port}"},
        proxied,  # which speaks TLS for the server
        {"Origin": "https://api.example", "Sec-Fetch-Site": "same-origin"},  # and changes the host
    ):
        assert http.patch("/settings", json={}, headers=headers).status_code == 200
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}
    assert http.get("/dashboard", headers=link).status_code == 200
    assert http.post("/trace/stop", headers=link).status_code == 403


def test_what_a_server_is_called() -> None:
    own = socket.gethostname()
    always = ["127.0.0.1:80", "10.1.2.3", "[::1]:8000", "LOCALHOST", "a.localhost:1", "localhost."]
    never = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "@localhost",
             "evil.example:80:80", "[evil.example]", "a b.example"]  # fmt: skip
    lan = [own, f"{own}:8000", f"{own.partition('.')[0]}.local", "legato:8000"]
    inside = ["host.docker.internal:8000", "host.containers.internal", "llm.team.svc",
              "llm.team.svc.cluster.local:80"]  # fmt: skip
    for config, some, others in (
        (ServerConfig(), [], ["legato:8000", "other.local", *inside]),
        (ServerConfig(host="::1"), [], ["legato"]),
        (ServerConfig(host="localhost"), [], ["legato"]),
        (ServerConfig(host="0.0.0.0"), [*lan, *inside],
         ["other.local", "api.example", "svc.example", "docker.internal.example"]),
        (ServerConfig(host="api.example"), ["api.example:80", *lan], ["b.api.example"]),
        (ServerConfig(allowed_hosts=("API.example", ".b.example")),
         ["api.EXAMPLE", "a.b.example"], ["b.example", "x.api.example", "ab.example"]),
        (ServerConfig(api_keys=("k",), allowed_hosts=("api.example",)),
         ["api.example", *inside], ["legato"]),
    ):  # fmt: skip
        names = HostNames(config)
        assert [name for name in [*always, *some] if name not in names] == []
        assert [name for name in [*never, *others] if name in names] == []
        assert not any(map(names.is_own, inside))
    for config in ServerConfig(api_keys=("k",)), ServerConfig(allowed_hosts=("*",)):
        assert all(name in HostNames(config) for name in [*always, *never])
