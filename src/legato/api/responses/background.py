"""Responses that are made without their client, which polls them or follows their events."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from itertools import chain

from legato.api.http.bodies import EVENT_END, typed_event_pieces
from legato.api.http.errors import ApiError, as_api_error
from legato.api.http.json_text import cut, joined
from legato.api.http.outlet import next_slice
from legato.api.responses.response_answer import ResponsesFormat, stored_pieces
from legato.api.responses.response_events import ResponseAnswer, Status, StreamError
from legato.api.submit import JobRun
from legato.core.errors import naming_fields
from legato.language.completion import CompletionDelta

_EVENT_BYTES = 128
"""Memory of an event beside its text."""
_EVENTS_AT_ONCE = 64
_PAGE_BYTES = 2**16
"""A run that has grown by so much is counted again."""


class EventLog:
    """The events of a stream, for clients that follow it from any of them on.

    Events and clients share the bytes of large pieces.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[tuple[bytes, ...]] = []
        self._unfinished: list[bytes] = []  # pieces of the next event
        self._num_events = 0
        self._is_ended = False
        self._is_dropped = False
        self._changed = asyncio.Event()

    def append(self, pieces: Iterable[bytes]) -> None:
        """Append pieces of events, as made by `typed_event_pieces`."""
        if self._is_dropped:
            return
        for piece in pieces:
            self._unfinished.append(piece)
            if piece == EVENT_END:
                event = tuple(joined(self._unfinished))
                self._unfinished.clear()
                self._events.append(event)
                self._num_events += 1
                self.num_bytes += sum(map(len, event)) + _EVENT_BYTES
        self._tell()

    def end(self) -> None:
        """Let clients go that have read all events."""
        self._is_ended = True
        self._tell()

    def drop(self) -> None:
        """Forget all events. Clients that have not read them all get an error in their place."""
        self._num_events += not self._is_ended  # one that will not come
        self._is_dropped = True
        self._events.clear()
        self.end()

    async def after(self, number: int) -> AsyncGenerator[bytes]:
        """Yield the events after one, as they come, in small slices; the first has the number 0."""
        unread = number + 1
        while True:
            changed = self._changed
            while unread < self._num_events:
                if self._is_dropped:
                    yield b"".join(typed_event_pieces([StreamError(sequence_number=unread)]))
                    return
                some = self._events[unread : unread + _EVENTS_AT_ONCE]
                unread += len(some)
                pieces, is_all = cut(chain.from_iterable(some)), False
                while not is_all:
                    made, is_all = next_slice(pieces)
                    data = b"".join(made)
                    made.clear()  # the client may read no more for long
                    yield data
            if self._is_ended and unread >= self._num_events:
                return
            if changed is self._changed:
                await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class BackgroundRun:
    """Makes one response.

    Attributes:
        log: its events; None if they are not kept.
        num_bytes: memory that its unfinished output and its events take.

    Args:
        grown: called when it has grown.
        finish: called with the pieces of the response's JSON, at its end.
    """

    def __init__(
        self,
        run: JobRun,
        response: ResponsesFormat,
        *,
        grown: Callable[[], object],
        finish: Callable[[list[bytes]], object],
    ) -> None:
        self.log = EventLog() if run.job.answer.is_streamed else None
        self.num_bytes = 0
        self._run = run
        self._response = response
        self._grown = grown
        self._finish = finish
        self._writer = response.events()
        self._counted_bytes = 0
        self._status: Status = "queued"
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._append(list(self._writer.written(response.queued())))
        self._making = asyncio.create_task(self._make())
        self._ending = asyncio.create_task(self._end())  # never cancelled: it finishes the response

    async def begun(self) -> None:
        """Wait until the engine has the request; raises as `JobRun.submitted`."""
        await asyncio.shield(self._begun)

    @property
    def so_far(self) -> ResponseAnswer:
        """The response as it is now."""
        return self._response.so_far(self._status)

    def cancel(self) -> None:
        """End it early; this has no effect on a response that has ended, or is ending."""
        self._making.cancel()

    def drop(self) -> None:
        """End it early, and forget its events: it is no longer stored."""
        self.cancel()
        if self.log is not None:
            self.log.drop()

    async def cancelled(self) -> None:
        """End it early, and wait for the end."""
        self.cancel()
        await asyncio.wait([self._ending])

    async def _end(self) -> None:
        """Append the last events once the job has ended or was cancelled."""
        await asyncio.wait([self._making])
        is_cancelled = self._making.cancelled()
        try:
            await self._append_all(
                self._closed("cancelled") if is_cancelled else self._making.result()
            )
        finally:
            if not self._begun.done():
                self._begun.set_result(None)
            if self.log is not None:
                self.log.end()
            del self._run  # the response may be stored for long, its prompt need not be

    async def _make(self) -> Iterable[bytes]:
        """Run the job; return the events of its end. Making them finishes the response."""
        try:
            names = self._run.job.answer.field_names
            with naming_fields(**names), self._run.context.lifecycle.in_flight():
                async with self._run.submitted(self._take) as submission:
                    self._begun.set_result(None)
                    await submission.ended.wait()
                    submission.check()
        except Exception as error:
            if not self._begun.done():
                self._begun.set_exception(error)
            told = as_api_error(error)
            return chain(self._writer.failed(told), self._closed("failed", told))
        return self._writer.end()

    def _closed(self, status: Status, error: ApiError | None = None) -> Iterator[bytes]:
        """Finish a response that ends early; yield a pause after each piece of it."""
        data: list[bytes] = []
        for piece in stored_pieces(self._response.closed(status, error)):
            data.append(piece)
            yield b""
        self._finish(data)

    async def _append_all(self, pieces: Iterable[bytes]) -> None:
        """Append the last events, made in slices."""
        unread, is_all = iter(pieces), False
        while not is_all:
            made, is_all = next_slice(unread)
            self._append(made)
            await self._run.context.turns.turn()

    def _take(self, choice: int, delta: CompletionDelta) -> None:
        self._status = "in_progress"
        self._run.sent(choice, delta)
        self._append(list(self._writer.pieces(choice, delta)))

    def _append(self, pieces: list[bytes]) -> None:
        if self.log is not None:
            self.log.append(pieces)
        self.num_bytes += sum(map(len, pieces))
        if self.num_bytes - self._counted_bytes > _PAGE_BYTES:
            self._counted_bytes = self.num_bytes
            self._grown()
