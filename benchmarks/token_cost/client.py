"""Streams that are all read by one process, which hardly looks at what they bring."""

import asyncio

import msgspec

from benchmarks.runner.raw_http import post

_PATIENCE_S = 60.0
_SETTLE_S = 0.5
_READ_BYTES = 2**16
_EVENT_END = b"}\n\n"
_NUM_TOKENS = 4000
_BODY = {"temperature": 0, "ignore_eos": True, "stream": True}
_LIMIT = {"max_tokens": _NUM_TOKENS}
_MESSAGES = [{"role": "user", "content": "Tell me a story."}]
_TOOL = {"type": "function", "function": {"name": "look_up", "description": "What a word means"}}
REQUESTS: dict[str, tuple[str, dict[str, object]]] = {
    "chat": ("/v1/chat/completions", {"messages": _MESSAGES, **_LIMIT}),
    "chat with tools": (
        "/v1/chat/completions",
        {"messages": _MESSAGES, "tools": [_TOOL], **_LIMIT},
    ),
    "completions": ("/v1/completions", {"prompt": "Once upon a time", **_LIMIT}),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": _NUM_TOKENS}),
    "messages": ("/v1/messages", {"messages": _MESSAGES, **_LIMIT}),
}
"""Key what the table calls it, value the path and the body."""


class Streams:
    """Greedy streams of one of `REQUESTS`, from when each has begun until the block ends.

    Attributes:
        num_tokens: that have come.
    """

    def __init__(self, port: int, kind: str, num_streams: int) -> None:
        self.num_tokens = 0
        self._port = port
        path, fields = REQUESTS[kind]
        self._request = post(path, msgspec.json.encode({**_BODY, **fields}))
        self._num_streams = num_streams
        self._reading: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Streams":
        async with asyncio.timeout(_PATIENCE_S):
            streams = await asyncio.gather(*(self._begin() for _ in range(self._num_streams)))
        self._reading = [asyncio.create_task(self._read(*stream)) for stream in streams]
        await asyncio.sleep(_SETTLE_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        num_ended = sum(task.done() for task in self._reading)
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        if num_ended:
            raise RuntimeError(f"{num_ended} streams ended while they were measured")

    async def _begin(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream whose first token has come."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(self._request)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"not a stream: {status!r}")
        await reader.readuntil(_EVENT_END)
        return reader, writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            end = b""  # of what came before, in which an event may end
            while data := await reader.read(_READ_BYTES):
                text = end + data
                self.num_tokens += text.count(_EVENT_END)
                end = text[-len(_EVENT_END) + 1 :]
        finally:
            writer.close()
