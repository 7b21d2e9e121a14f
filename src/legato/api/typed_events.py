"""Streams of typed events, some of them before the first delta's."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from legato.api.http.bodies import TypedEvent, typed_event_pieces
from legato.api.http.errors import ApiError
from legato.api.http.json_text import json_pieces
from legato.language.completion import CompletionDelta


class EventSource(Protocol):
    """Makes the typed events of one endpoint's stream."""

    def begun(self, first: CompletionDelta | None) -> Sequence[TypedEvent]:
        """Return the events before the first delta; there is none if an error comes before it."""

    def take(self, choice: int, delta: CompletionDelta) -> Sequence[TypedEvent]:
        """Return the events of one delta."""

    def ended(self) -> Sequence[TypedEvent]:
        """Return the events after the last delta."""

    def failed(self, error: ApiError) -> Sequence[TypedEvent]:
        """Return the last events of a stream that an error ends."""


class TypedEventWriter:
    """The `EventWriter` of an `EventSource`.

    Args:
        encode: makes JSON of an event, in pieces.
    """

    def __init__(
        self, source: EventSource, encode: Callable[[TypedEvent], Iterable[bytes]] = json_pieces
    ) -> None:
        self._source = source
        self._encode = encode
        self._has_begun = False

    def delta(self, choice: int, delta: CompletionDelta) -> bytes:
        return b"".join(self.pieces(choice, delta))

    def pieces(self, choice: int, delta: CompletionDelta) -> Iterator[bytes]:
        """Return the pieces of `delta`."""
        return chain(self._begun(delta), self.written(self._source.take(choice, delta)))

    def end(self) -> Iterator[bytes]:
        return chain(self._begun(), self.written(self._source.ended()))

    def failed(self, error: ApiError) -> Iterator[bytes]:
        return chain(self._begun(), self.written(self._source.failed(error)))

    def _begun(self, first: CompletionDelta | None = None) -> Iterable[bytes]:
        if self._has_begun:
            return ()
        self._has_begun = True
        return self.written(self._source.begun(first))

    def written(self, events: Sequence[TypedEvent]) -> Iterator[bytes]:
        """Return the pieces of events."""
        return typed_event_pieces(events, self._encode)
