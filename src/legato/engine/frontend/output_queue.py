"""The engine's outputs for one prompt, on their way to whoever reads its stream."""

import asyncio

from legato.core.outputs import RequestOutput
from legato.engine.errors import SlowReaderError

_Received = tuple[RequestOutput, float]  # and when it came, in seconds


class OutputQueue:
    """A bounded queue: a reader that stays behind loses its stream, not the server its memory.

    Args:
        max_outputs: that may wait; each is about a token.
    """

    def __init__(self, max_outputs: int) -> None:
        self._items: asyncio.Queue[_Received | Exception] = asyncio.Queue()
        self._max_outputs = max_outputs
        self._is_closed = False

    def put(self, output: RequestOutput, received_s: float) -> bool:
        """Add an output; False where none are taken any more, so that its request may as well end.

        An output too many ends the stream: what waits is dropped, and the reader gets a
        `SlowReaderError` instead.
        """
        if not self._is_closed and self._items.qsize() >= self._max_outputs:
            self._items = asyncio.Queue()  # nobody waits at a full one
            self.close(
                SlowReaderError(
                    f"the stream was ended: {self._max_outputs} of its tokens waited to be read"
                )
            )
        if self._is_closed:
            return False
        self._items.put_nowait((output, received_s))
        return True

    def close(self, error: Exception) -> None:
        """Let the reader have what waits, and then `error`."""
        self._is_closed = True
        self._items.put_nowait(error)

    async def get(self) -> tuple[RequestOutput, float]:
        """The next output, and when it was received.

        Raises:
            SlowReaderError: the reader was too far behind.
            Exception: what the queue was closed with.
        """
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item
