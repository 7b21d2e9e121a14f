"""Which pages a browser lets through to a server, and which the server does not answer."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.api.launch import ServerProcess
from tests.browser.conftest import KEY

pytestmark = pytest.mark.browser


@contextmanager
def page_elsewhere(html: str) -> Iterator[str]:
    """Its URL, on a server of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://page.example:{server.server_port}/"
        server.shutdown()
        thread.join()


def at(name: str, target: ServerProcess) -> str:
    return f"http://{name}:{urlsplit(target.url).port}"


@pytest.mark.parametrize("name", ["localhost", "dashboard.example"])
def test_the_dashboard_under_another_name(tab: Any, target: ServerProcess, name: str) -> None:
    """It reads, and it changes."""
    tab.goto(f"{at(name, target)}/dashboard")
    tab.get_by_label("Key", exact=True).fill(KEY)
    tab.keyboard.press("Enter")
    tab.locator("#connection.is-live").wait_for()
    with tab.expect_response("**/settings") as changed:
        tab.get_by_label("Policy").select_option("prefill-first")
    assert changed.value.status == HTTPStatus.OK
    tab.get_by_label("Policy").select_option("stall-free")


def test_a_name_that_points_here_is_refused(tab: Any, target: ServerProcess) -> None:
    answer = tab.goto(f"{at('evil.example', target)}/metrics")
    assert answer.status == HTTPStatus.FORBIDDEN
    assert answer.json()["error"]["code"] == "host_not_allowed"


def test_a_form_elsewhere_changes_nothing_and_a_link_leads_here(
    tab: Any, target: ServerProcess
) -> None:
    form = f'<form method="post" action="{target.url}/trace/stop"><button>send</button></form>'
    link = f'<a href="{target.url}/dashboard">dashboard</a>'
    with page_elsewhere(form + link) as url:
        tab.goto(url)
        with tab.expect_navigation() as submitted:
            tab.get_by_role("button", name="send").click()
        assert submitted.value.status == HTTPStatus.FORBIDDEN
        assert submitted.value.json()["error"]["code"] == "origin_not_allowed"
        tab.goto(url)
        with tab.expect_navigation() as followed:
            tab.get_by_role("link", name="dashboard").click()
        assert followed.value.status == HTTPStatus.OK
