"""The way past ASGI, on a connection that is not there."""

from types import SimpleNamespace
from typing import Any

from legato.api.http.outlet import ConnectionOutlet, NotifyingFlow


def test_it_tells_when_a_client_that_was_behind_has_caught_up() -> None:
    written: list[bytes] = []
    transport: Any = SimpleNamespace(write=written.append)
    cycle: Any = SimpleNamespace(
        transport=transport, response_started=False, disconnected=False, chunked_encoding=True
    )
    flow = NotifyingFlow(transport)
    outlet = ConnectionOutlet(cycle, flow)
    assert not outlet.is_writable, "the answer has not begun"
    cycle.response_started = True
    with outlet.watched(lambda: outlet.write(b"told")):
        flow.pause_writing()
        assert not outlet.is_writable
        flow.resume_writing()
        assert outlet.is_writable
    assert written == [b"4\r\ntold\r\n"]
    flow.pause_writing()
    flow.resume_writing()
    assert len(written) == 1, "nobody listens any more"
    outlet.write(b"")
    assert len(written) == 1, "a chunk of no bytes is the last one"
    cycle.disconnected = True
    outlet.write(b"lost")
    cycle.disconnected, cycle.chunked_encoding = False, False
    outlet.write(b"plain")
    assert written[1:] == [b"plain"]
