"""Where each request of a front door runs: at one replica, or at one for its prompt and another for
what follows."""

from collections.abc import Iterator
from itertools import count

import msgspec

from legato.fleet.link import Link


class Half(msgspec.Struct, frozen=True):
    """What one replica does of a request.

    Attributes:
        sent_id: under which it was sent; nothing else has been, so that what comes late of a
            request that was sent again is not taken for what comes of it now.
        is_prefill: whether it is the prompt alone, which another one continues.
    """

    request_id: str
    sent_id: str
    link: Link
    is_prefill: bool = False


class Placed(msgspec.Struct):
    """A request that was sent.

    Attributes:
        decode: what clients are sent comes of this.
        prefill: what this computes, `decode` fetches; None where it computes all itself, or has
            begun.
        refusals: by other replicas before; key replica id, value when to try it there again.
        num_tokens: that have come.
    """

    decode: Half
    refusals: dict[str, float]
    prefill: Half | None = None
    num_tokens: int = 0

    @property
    def link(self) -> Link:
        """What its tokens come by."""
        return self.decode.link

    @property
    def halves(self) -> list[Half]:
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]


class Placements:
    """All requests that were sent and have not ended."""

    def __init__(self) -> None:
        self._placed: dict[str, Placed] = {}  # key request id
        self._halves: dict[str, Half] = {}  # key sent id, of those that run
        self._num_sent = count()

    def __len__(self) -> int:
        return len(self._placed)

    def __iter__(self) -> Iterator[Placed]:
        return iter(tuple(self._placed.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._placed

    def of(self, half: Half) -> Placed:
        """What it is a half of."""
        return self._placed[half.request_id]

    def half(self, link: Link, sent_id: str) -> Half | None:
        """What runs there under that id; None where it has ended, or is not to run any more."""
        half = self._halves.get(sent_id)
        return half if half is not None and half.link is link else None

    def at(self, link: Link) -> list[Half]:
        """What runs there."""
        return [half for half in self._halves.values() if half.link is link]

    def is_used(self, link: Link) -> bool:
        """Whether something runs there, or is still fetched from there."""
        return any(half.link is link for placed in self for half in placed.halves)

    def add(
        self, request_id: str, decode: Link, prefill: Link | None, refusals: dict[str, float]
    ) -> Placed:
        """A request is about to be sent."""
        count = next(self._num_sent)
        sent_id = f"{request_id}.{count}"
        placed = Placed(Half(request_id, sent_id, decode), refusals)
        self._placed[request_id] = placed
        self._halves[sent_id] = placed.decode
        if prefill is not None:
            sent_id = f"{request_id}.prefill.{count}"
            placed.prefill = Half(request_id, sent_id, prefill, is_prefill=True)
            self._halves[placed.prefill.sent_id] = placed.prefill
        return placed

    def end(self, request_id: str) -> Placed:
        """A request has ended, or is to be sent again; its halves may still run."""
        return self._placed.pop(request_id)

    def end_half(self, half: Half) -> bool:
        """It runs no more; whether it did."""
        return self._halves.pop(half.sent_id, None) is not None


def told_id(sent_id: str) -> str:
    """What those who watch know it by: a half, however often it was sent."""
    return sent_id.rpartition(".")[0]
