"""Parses HTTP/1 requests; none is upgraded to another protocol."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from legato.api.http.errors import (
    ApiError,
    malformed_http,
    one_host_needed,
    unknown_transfer_coding,
)

_HEAD = ("on_message_begin", "on_url", "on_header", "on_headers_complete")
_REST = ("on_body", "on_chunk_header", "on_message_complete")
_FRAMING = (b"content-length", b"transfer-encoding")


def head_refusal(headers: Iterable[tuple[bytes, bytes]], http_version: str) -> ApiError | None:
    """Return an error if a proxy could read the request's end or host differently; else None.

    httptools refuses the rest: other lengths, two lengths or a length beside chunks, folded lines.
    It accepts any codings before `chunked`, and would return their encoded bytes as the body.

    Args:
        headers: names in lower case, and values.
    """
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and http_version == "1.0":  # RFC 9112, section 6.1
        return malformed_http()
    if codings and codings != [b"chunked"]:
        return unknown_transfer_coding()
    num_hosts = sum(name == b"host" for name, _ in headers)  # RFC 9112, section 3.2
    if num_hosts > 1 or (num_hosts == 0 and http_version != "1.0"):
        return one_host_needed()
    return None


class RequestParser(httptools.HttpRequestParser):
    """httptools' parser, which treats `Upgrade` like any other header (RFC 9110, section 7.8).

    The original ends a request with `Upgrade`, or a CONNECT, after its headers, with an
    `on_message_complete` that the protocol must ignore while `should_upgrade`. This parser calls it
    again after the body.

    Args:
        protocol: gets the callbacks; its `headers` are the request's.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._begin(protocol)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        unread = memoryview(data)
        while unread:
            try:
                super().feed_data(unread)
                return
            except httptools.HttpParserUpgrade as upgrade:
                unread = unread[upgrade.args[0] :]
                self._go_on()

    def _go_on(self) -> None:
        """Restart the parser as if a head without an upgrade had just been parsed."""
        framing = [(name, value) for name, value in self._protocol.headers if name in _FRAMING]
        lines = [b"POST / HTTP/1.1", *(name + b": " + value for name, value in framing)]
        callbacks = _AllButTheHead(self._protocol)
        self._begin(callbacks)
        super().feed_data(b"\r\n".join([*lines, b"", b""]))
        callbacks.is_head = False

    def _begin(self, callbacks: object) -> None:
        super().__init__(callbacks)
        # As in uvicorn: answer a request with "Connection: close" even if more bytes follow.
        self.set_dangerous_leniencies(lenient_data_after_close=True)


class _AllButTheHead:
    """Passes a protocol's callbacks on, but none for the head.

    Attributes:
        is_head: whether the head is being parsed.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self.is_head = True
        for name in _HEAD:
            setattr(self, name, partial(self._call, getattr(protocol, name)))
        for name in _REST:
            setattr(self, name, getattr(protocol, name))

    def _call(self, callback: Any, *args: bytes) -> None:
        if not self.is_head:
            callback(*args)
