"""The replicas of each request of a front door: one, or two.

With two, one computes the prompt and the other continues it.
"""

from collections.abc import Iterator
from itertools import count

import msgspec

from legato_fleet.link import Link


class Half(msgspec.Struct, frozen=True):
    """A replica's part of a request.

    Attributes:
        sent_id: unique to this sending, so that late output of an earlier one is not mistaken for
            it.
        is_prefill: whether the replica only computes the prompt, for another to continue.
    """

    request_id: str
    sent_id: str
    link: Link
    is_prefill: bool = False


class Placed(msgspec.Struct):
    """A request that was sent.

    Attributes:
        decode: its tokens go to the client.
        prefill: computes the prompt's blocks for `decode`; None if `decode` computes the prompt
            itself, or has begun.
        refusals: of other replicas; key replica id, value when to try it again.
        num_tokens: that have come.
    """

    decode: Half
    refusals: dict[str, float]
    prefill: Half | None = None
    num_tokens: int = 0

    @property
    def link(self) -> Link:
        """The link that its tokens come through."""
        return self.decode.link

    @property
    def halves(self) -> list[Half]:
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]


class Placements:
    """All requests that were sent and have not ended."""

    def __init__(self) -> None:
        self._placed: dict[str, Placed] = {}  # key: request id
        self._halves: dict[str, Half] = {}  # key: sent id of a running half
        self._num_sent = count()

    def __len__(self) -> int:
        return len(self._placed)

    def __iter__(self) -> Iterator[Placed]:
        return iter(tuple(self._placed.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._placed

    def of(self, half: Half) -> Placed:
        """Return the request of a half."""
        return self._placed[half.request_id]

    def half(self, link: Link, sent_id: str) -> Half | None:
        """Return the half with this sent id at a replica; None if it has ended or was aborted."""
        half = self._halves.get(sent_id)
        return half if half is not None and half.link is link else None

    def at(self, link: Link) -> list[Half]:
        """Return the halves that run at a replica."""
        return [half for half in self._halves.values() if half.link is link]

    def is_used(self, link: Link) -> bool:
        """Whether a half runs at the replica, or blocks are still fetched from it."""
        return any(half.link is link for placed in self for half in placed.halves)

    def add(
        self, request_id: str, decode: Link, prefill: Link | None, refusals: dict[str, float]
    ) -> Placed:
        """Add a request that is about to be sent."""
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
        """Remove a request that has ended or will be sent again; its halves may still run."""
        return self._placed.pop(request_id)

    def end_half(self, half: Half) -> bool:
        """Remove a half that no longer runs; return whether it was running."""
        return self._halves.pop(half.sent_id, None) is not None


def client_request_id(sent_id: str) -> str:
    """Return the id of a half for watchers, the same each time that it is sent."""
    return sent_id.rpartition(".")[0]
