"""What leads a browser, or a mistyped path, to what there is."""

import re

import httpx
import pytest


def test_the_root_is_a_chat_that_leads_to_the_dashboard(http: httpx.Client) -> None:
    found = http.get("/", headers={"Accept": "text/html,*/*;q=0.8"})
    assert found.headers["Content-Type"].startswith("text/html")
    assert 'href="dashboard"' in found.text


def test_the_reference_asks_nobody_else(http: httpx.Client) -> None:
    page = http.get("/docs")
    policy = page.headers["content-security-policy"]
    assert "script-src 'self'; style-src 'self';" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert not re.search(r"<script>|<style|\son\w+=|https?://|\sstyle=", page.text)
    paths = re.findall(r'(?:href|src)="([^"]+)"', page.text)
    assert len(paths) == 4
    for path in paths:
        http.get(f"/{path}").raise_for_status()


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("GET", "/v1/foo", "no such endpoint: GET /v1/foo"),
        ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions"),
        ("POST", "/v1/v1/completions", "did you mean /v1/completions"),
        ("POST", "/v1/completions/", "did you mean /v1/completions"),
        ("GET", "/redoc", "no such endpoint: GET /redoc"),
        ("GET", "/ready", "/health?"),
        ("GET", "/v1/ready/", "/health?"),
        ("GET", "/status", "did you mean /health?"),
        ("GET", "/prometheus", "did you mean /metrics?"),
        ("GET", "/ui", "did you mean /?"),
        ("POST", "/generate", "did you mean /v1/completions?"),
        ("POST", "/v1/chat", "did you mean /v1/chat/completions?"),
    ],
)
def test_an_endpoint_that_there_is_not(
    http: httpx.Client, method: str, path: str, told: str
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert told in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/settings", "GET, HEAD, PATCH"),
        ("POST", "/dashboard", "GET, HEAD"),
    ],
)
def test_a_method_that_an_endpoint_does_not_take(
    http: httpx.Client, method: str, path: str, allowed: str
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["Allow"] == allowed
    assert answer.json()["error"]["message"] == f"{path} does not take {method}, but {allowed}"
