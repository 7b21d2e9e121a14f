"""Clients that wait on threads of their own."""

import json
import threading
from typing import Any

import httpx

from tests.api.launch import ServerProcess, long_request


class BackgroundStream:
    """Reads a stream on a thread, from its first token on."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.is_complete = False
        self._server = server
        self._request = long_request(**fields)
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._begun.wait(60)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        headers = self._server.http.headers
        with (
            httpx.Client(base_url=self._server.url, headers=headers, timeout=60) as http,
            http.stream("POST", "/v1/completions", json=self._request) as response,
        ):
            for line in response.iter_lines():
                self._begun.set()
                if line == "data: [DONE]":
                    self.is_complete = True
                elif line:
                    self.chunks.append(json.loads(line.removeprefix("data: ")))


class BackgroundRequest:
    """Waits on a thread for a whole answer."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        self._server = server
        self._fields = fields
        self._responses: list[httpx.Response] = []
        self._thread = threading.Thread(target=self._post)
        self._thread.start()

    def join(self) -> httpx.Response:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._responses[0]

    def _post(self) -> None:
        headers = self._server.http.headers
        with httpx.Client(base_url=self._server.url, headers=headers, timeout=60) as http:
            self._responses.append(http.post("/v1/completions", json=self._fields))
