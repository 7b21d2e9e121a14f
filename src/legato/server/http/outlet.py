"""The way past ASGI for what is written token by token: to the connection, without a wait.

`send` is a coroutine behind those of all middleware, called in a task of the stream's own: for each
token that is a task to wake and a chain to go through. An answer still begins and ends with it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "legato.outlet"


class NotifyingFlow(FlowControl):
    """uvicorn's flow control, which tells when the client reads again.

    Attributes:
        on_writable: called then.
    """

    on_writable: Callable[[], object] = staticmethod(lambda: None)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.on_writable()


class Outlet:
    """Where the body of one answer goes, between its beginning and its end.

    Args:
        cycle: what is being answered, on a connection with a `NotifyingFlow`.
    """

    def __init__(self, cycle: RequestResponseCycle, flow: NotifyingFlow) -> None:
        self._cycle = cycle
        self._flow = flow

    @classmethod
    def of(cls, scope: Scope) -> "Outlet":
        """That of a request's answer."""
        outlet: Outlet = scope["extensions"][_EXTENSION]
        return outlet

    def put_into(self, scope: Scope) -> None:
        scope["extensions"] = {_EXTENSION: self}

    @property
    def is_writable(self) -> bool:
        """Whether the answer has begun, and its client keeps up with it."""
        return self._cycle.response_started and not self._flow.write_paused

    def write(self, data: bytes) -> None:
        """Write a piece of the body; what a client that has gone would get is dropped."""
        cycle = self._cycle
        if cycle.disconnected or not data:  # an empty chunk would end the answer
            return
        if cycle.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        cycle.transport.write(data)

    @contextmanager
    def watched(self, on_writable: Callable[[], object]) -> Iterator[None]:
        """Have this called whenever the client has caught up."""
        self._flow.on_writable = on_writable
        try:
            yield
        finally:
            del self._flow.on_writable

    async def caught_up(self) -> None:
        """Wait until the client has caught up, or gone."""
        await self._flow.drain()
