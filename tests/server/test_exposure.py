"""What a server shows of itself where nothing was asked for."""

import socket
from urllib.parse import urlsplit

import httpx
import psutil

from tests.server.launch import ServerProcess


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
    assert response.status_code == 405
    assert not [name for name in response.headers if name.startswith("access-control")]
    for content_type in (None, "text/plain", "application/x-www-form-urlencoded"):
        headers = {"Content-Type": content_type} if content_type else {}
        response = http.post("/v1/completions", content=b'{"prompt": "Hi"}', headers=headers)
        assert response.status_code == 400
