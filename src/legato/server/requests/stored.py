"""Stored responses, for parsing a body that continues them."""

from collections.abc import Iterator, Mapping

import msgspec

from legato.server.requests.response_items import Item, ItemReference, read_items


class StoredOutput(msgspec.Struct, frozen=True):
    """The parts of a stored answer that parsing needs."""

    id: str
    output: list[dict[str, object]]
    previous_response_id: str | None = None


class StoredTurn(msgspec.Struct, frozen=True):
    """One stored response.

    Attributes:
        input: its items, each with its id.
    """

    input: list[dict[str, object]]
    response: StoredOutput


_decode = msgspec.json.Decoder(list[StoredTurn]).decode


class Stored:
    """The stored responses that a body refers to.

    Args:
        data: a JSON list of `StoredTurn`; empty if there are none.
    """

    def __init__(self, data: bytes) -> None:
        turns = _decode(data) if data else []
        self._turns = {turn.response.id: turn for turn in turns}

    def history(self, response_id: str | None) -> list[Item]:
        """Return all items up to a response, the earliest first."""
        turns: list[StoredTurn] = []
        while response_id is not None:
            turns.append(self._turns[response_id])
            response_id = turns[-1].response.previous_response_id
        return [
            item
            for turn in reversed(turns)
            for item in self._items(turn.input + turn.response.output)
        ]

    def items(self) -> Mapping[str, Item]:
        """Return all stored items; key the id."""
        return {
            str(raw["id"]): item
            for turn in self._turns.values()
            for raw in turn.input + turn.response.output
            for item in self._items([raw])
        }

    @staticmethod
    def _items(raw: list[dict[str, object]]) -> Iterator[Item]:
        for item in read_items(raw):
            assert not isinstance(item, ItemReference), "which is not stored"
            yield item
