"""Answers of any size, made in small slices so that others get their turns."""

import time
from collections.abc import Iterable, Iterator

from starlette.types import Receive, Scope, Send

from legato.api.http.bodies import JSON, StreamedResponse
from legato.api.http.json_pieces import cut
from legato.api.http.turns import Turns

_SLICE_S = 0.001
_SLICE_BYTES = 2**16


class PacedResponse(StreamedResponse):
    """A body made while it is sent, no faster than its client reads.

    Args:
        turns: shared by all answers in progress.
    """

    def __init__(self, pieces: Iterable[bytes], turns: Turns, media_type: str = JSON) -> None:
        super().__init__({}, media_type)
        self._pieces = cut(pieces)
        self._turns = turns

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        first, is_all = next_slice(self._pieces)
        if is_all:
            self.headers["Content-Length"] = str(sum(map(len, first)))
        await self.begin(send)
        await _send(send, first, is_all=is_all)
        if not is_all:
            await self._turns.turn()
            await send_paced(send, self._pieces, self._turns)


async def send_paced(send: Send, pieces: Iterable[bytes], turns: Turns) -> None:
    """Send the rest of a body while it is made. Args: as of `PacedResponse`."""
    unread = cut(pieces)
    while True:
        made, is_all = next_slice(unread)
        await _send(send, made, is_all=is_all)
        if is_all:
            return
        await turns.turn()


def next_slice(pieces: Iterator[bytes]) -> tuple[list[bytes], bool]:
    """Return the pieces made in one turn, and whether they are the last."""
    ends_s = time.monotonic() + _SLICE_S
    made: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        made.append(piece)
        num_bytes += len(piece)
        if num_bytes >= _SLICE_BYTES or time.monotonic() > ends_s:
            return made, False
    return made, True


async def _send(send: Send, made: Iterable[bytes], *, is_all: bool) -> None:
    body = b"".join(made)
    await send({"type": "http.response.body", "body": body, "more_body": not is_all})
