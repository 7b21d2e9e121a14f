"""Streams over another server's connections: by ASGI, whose `send` may take its time."""

import asyncio

from starlette.types import Message

from legato.api.http.outlet import AsgiOutlet

START = {"type": "http.response.start", "status": 200, "headers": []}
END = {"type": "http.response.body", "body": b"end", "more_body": False}


class Client:
    """Reads a message whenever it is let."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def send(self, message: Message) -> None:
        await self.may_read.wait()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


async def test_pieces_come_in_order_between_beginning_and_end() -> None:
    client = Client()
    outlet = AsgiOutlet(client.send)
    assert not outlet.is_writable
    await outlet.send(START)
    assert outlet.is_writable
    for piece in (b"a", b"b"):
        outlet.write(piece)
    await outlet.send(END)
    assert client.body == b"abend"
    assert client.messages[0] == START
    assert client.messages[-1] == END


async def test_who_does_not_read_is_noticed_and_told_of_when_reading_again() -> None:
    client = Client()
    outlet = AsgiOutlet(client.send)
    await outlet.send(START)
    client.may_read.clear()
    told: list[bool] = []
    with outlet.watched(lambda: told.append(outlet.is_writable)):
        while outlet.is_writable:
            outlet.write(b"x" * 1000)
            await asyncio.sleep(0)
        assert not told
        client.may_read.set()
        await outlet.caught_up()
    assert told
    assert outlet.is_writable
    assert set(client.body) == {ord("x")}
