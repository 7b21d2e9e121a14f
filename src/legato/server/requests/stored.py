"""Stored responses, as a body that goes on from them is read beside them."""

from collections.abc import Iterator, Mapping

import msgspec

from legato.server.requests.response_items import Item, ItemReference, read_items


class StoredOutput(msgspec.Struct, frozen=True):
    """Of a stored answer, what the reader goes by."""

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
    """What a body names of what the server has stored.

    Args:
        data: a JSON list of `StoredTurn`; empty where there are none.
    """

    def __init__(self, data: bytes) -> None:
        turns = _decode(data) if data else []
        self._turns = {turn.response.id: turn for turn in turns}

    def history(self, response_id: str | None) -> list[Item]:
        """All items up to a response, the earliest first."""
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
        """All of them; key the id."""
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
