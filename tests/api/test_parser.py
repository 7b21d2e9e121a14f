"""A parser to which a wish for another protocol changes nothing."""

from typing import Any

import httptools
from hypothesis import given
from hypothesis import strategies as st

from legato.api.http.parser import RequestParser
from tests.profiles import examples

UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
WITHOUT = b"X-Connection: Upgrade\r\nX-Upgrade: h2c\r\n"
BODIES = {
    b"": b"",
    b"Content-Length: 12\r\n": b"GET / HTTP/1",
    b"Transfer-Encoding: chunked\r\n": b"5\r\nGET /\r\nb;x=y\r\nConnection:\r\n0\r\nX: y\r\n\r\n",
}


class Recorded:
    """What a parser said of requests, however it cut their bodies.

    Attributes:
        said: name and arguments of each callback.
    """

    def __init__(self, parser: type[httptools.HttpRequestParser]) -> None:
        self.said: list[list[Any]] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self.parser = parser(self)

    def on_message_begin(self) -> None:
        self.headers = []
        self.said.append(["begin"])

    def on_url(self, url: bytes) -> None:
        self._extend("url", url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))
        self.said.append(["header", name.removeprefix(b"X-"), value])

    def on_headers_complete(self) -> None:
        self.said.append(["head", self.parser.get_method(), self.parser.should_keep_alive()])

    def on_chunk_header(self) -> None:
        self.said.append(["chunk"])

    def on_body(self, body: bytes) -> None:
        self._extend("body", body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self.said.append(["complete"])

    def _extend(self, name: str, data: bytes) -> None:
        if self.said[-1][0] == name:
            self.said[-1][1] += data
        else:
            self.said.append([name, data])


def request(method: bytes, framing: bytes, asks_for_upgrade: bytes) -> bytes:
    head = method + b" /a HTTP/1.1\r\nHost: localhost\r\n" + asks_for_upgrade + framing + b"\r\n"
    return head + BODIES[framing]


@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from([b"GET", b"POST"]), st.sampled_from(sorted(BODIES)), st.booleans()
        ),
        min_size=1,
        max_size=4,
    ),
    data=st.data(),
)
@examples(200)
def test_an_upgrade_is_a_header_like_any_other(
    requests: list[tuple[bytes, bytes, bool]], data: st.DataObject
) -> None:
    expected, found = Recorded(httptools.HttpRequestParser), Recorded(RequestParser)
    for method, framing, is_upgrade in requests:
        expected.parser.feed_data(request(method, framing, WITHOUT if is_upgrade else b""))
    sent = b"".join(
        request(method, framing, UPGRADE if is_upgrade else b"")
        for method, framing, is_upgrade in requests
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        found.parser.feed_data(sent[start:end])
    assert found.said == expected.said
