"""Answers that are told in typed events, some of which stand before the first delta's."""

from collections.abc import Callable, Sequence
from typing import Protocol

from legato.engine.frontend.completion import CompletionDelta
from legato.server.http.bodies import TypedEvent, encode_json, typed_events
from legato.server.http.errors import ApiError


class EventTeller(Protocol):
    """What one endpoint tells of an answer while it comes about."""

    def begun(self) -> Sequence[TypedEvent]:
        """Before the first delta is taken."""

    def take(self, choice: int, delta: CompletionDelta) -> Sequence[TypedEvent]:
        """Of one delta."""

    def ended(self) -> Sequence[TypedEvent]:
        """Behind the last one."""

    def failed(self, error: ApiError) -> Sequence[TypedEvent]:
        """Where no more comes."""


class TypedEventWriter:
    """The `EventWriter` of a teller.

    Args:
        encode: makes JSON of an event.
    """

    def __init__(
        self, teller: EventTeller, encode: Callable[[TypedEvent], bytes] = encode_json
    ) -> None:
        self._teller = teller
        self._encode = encode
        self._has_begun = False

    def delta(self, choice: int, delta: CompletionDelta) -> bytes:
        return self._begun() + self._written(self._teller.take(choice, delta))

    def end(self) -> bytes:
        return self._begun() + self._written(self._teller.ended())

    def failed(self, error: ApiError) -> bytes:
        return self._begun() + self._written(self._teller.failed(error))

    def _begun(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._written(self._teller.begun())

    def _written(self, events: Sequence[TypedEvent]) -> bytes:
        return typed_events(events, self._encode)
