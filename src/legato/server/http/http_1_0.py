"""Answers to HTTP/1.0 clients, which know neither chunks nor interim answers."""

from typing import cast

from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(cycle: RequestResponseCycle) -> Send:
    """Wrap `cycle.send`: the end of the connection ends an answer without a length."""
    cycle.waiting_for_100_continue = False
    is_open_ended = False

    async def send(message: Message) -> None:
        nonlocal is_open_ended
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message["headers"]}
            is_open_ended = b"content-length" not in names
            if is_open_ended:
                cycle.chunked_encoding = False
        elif is_open_ended:
            # Pass uvicorn's length check with any length.
            cycle.expected_content_length = len(message.get("body", b""))
        await cast("Send", cycle.send)(message)

    return send
