"""Sends the traffic to a server and notes what comes back, from one process that is light."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http import HTTPStatus

from benchmarks.overload.traffic import Arrival
from benchmarks.runner.raw_http import post
from legato_lab.load.token_stream import TokenStream
from legato_lab.simulation.record import RequestError, RequestRecord, Status

_PATIENCE_S = 180.0
"""After which a request that has not ended is lost."""
_BEAT_S = 0.01
_READ_BYTES = 2**16
_SHOWN_BYTES = 300
_RETRY_AFTER = re.compile(rb"^retry-after: *(\d+)", re.IGNORECASE | re.MULTILINE)
_FINISHED = re.compile(rb'"finish_reason":\s*"')
_NUM_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')

OnProgress = Callable[[str], None]


class Answer(RequestRecord, frozen=True, kw_only=True, omit_defaults=True):
    """What came of one request: "cancelled" is a client that went away, "error" a request lost.

    Attributes:
        answered_s: when the status came, from the start of the run.
    """

    answered_s: float | None = None


class _RefusedError(RequestError):
    """429 with Retry-After."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class Load:
    """All clients of one run.

    Attributes:
        answers: of the requests that have ended.
        lateness_s: by how much the client itself woke too late, a hundred times a second.
    """

    def __init__(self, port: int) -> None:
        self.answers: list[Answer] = []
        self.lateness_s: list[float] = []
        self._port = port
        self._num_sent = 0
        self._start_s = 0.0

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    async def run(self, traffic: Sequence[Arrival], on_progress: OnProgress) -> None:
        """Send each request when it is due, and wait until all have ended."""
        self._start_s = time.perf_counter()
        watching = [
            asyncio.create_task(self._beat()),
            asyncio.create_task(self._tell(on_progress)),
        ]
        async with asyncio.TaskGroup() as tasks:
            for arrival in traffic:
                await asyncio.sleep(arrival.request.arrival_s - self.now_s())
                self._num_sent += 1
                tasks.create_task(self._send(arrival))
        for task in watching:
            task.cancel()

    async def _beat(self) -> None:
        while True:
            due_s = self.now_s() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            self.lateness_s.append(self.now_s() - due_s)

    async def _tell(self, on_progress: OnProgress) -> None:
        while True:
            await asyncio.sleep(10.0)
            counts = Counter(answer.status for answer in self.answers)
            on_progress(
                f"{self.now_s():.0f} s: {self._num_sent} sent, {counts['ok']} finished, "
                f"{counts['cancelled']} left, {counts['refused']} refused, {counts['error']} lost, "
                f"{self._num_sent - counts.total()} in flight"
            )

    async def _send(self, arrival: Arrival) -> None:
        exchange = _Exchange(arrival)
        status: Status = "ok"
        error: str | None = None
        retry_after_s: float | None = None
        sent_s = self.now_s()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                is_whole = await exchange.run(self._port)
            status = "ok" if is_whole else "cancelled"
        except _RefusedError as refusal:
            status, retry_after_s = "refused", refusal.retry_after_s
        except (RequestError, OSError, asyncio.IncompleteReadError, TimeoutError) as lost:
            status, error = "error", f"{type(lost).__name__}: {lost}"
        self.answers.append(
            Answer(
                request=arrival.request,
                sent_s=sent_s,
                status=status,
                token_times_s=[at_s - self._start_s for at_s in exchange.token_times_s],
                num_tokens=len(exchange.token_times_s),
                retry_after_s=retry_after_s,
                error=error,
                answered_s=exchange.answered_s and exchange.answered_s - self._start_s,
            )
        )


class _Exchange:
    """One request on a connection of its own.

    Attributes:
        answered_s, token_times_s: on the clock of `time.perf_counter`.
    """

    def __init__(self, arrival: Arrival) -> None:
        self.answered_s: float | None = None
        self.token_times_s: list[float] = []
        self._arrival = arrival

    async def run(self, port: int) -> bool:
        """Returns whether the client stayed to the end.

        Raises:
            RequestError: it was refused (`_RefusedError`), failed, or had no end.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(post(self._arrival.path, self._arrival.body, Connection="close"))
            head = await reader.readuntil(b"\r\n\r\n")
            self.answered_s = time.perf_counter()
            await _check(head, reader)
            return await self._read_tokens(reader)
        finally:
            writer.transport.abort()

    async def _read_tokens(self, reader: asyncio.StreamReader) -> bool:
        leaves_after = self._arrival.leaves_after
        stream = TokenStream(self.token_times_s)
        last = b""
        # Each event is a chunk of HTTP: the lines of its frame are none of the event.
        while chunk := await reader.read(_READ_BYTES):
            stream.feed(chunk, time.perf_counter())
            last = (last + chunk)[-_READ_BYTES:]
            if leaves_after is not None and len(self.token_times_s) >= leaves_after:
                return False
        stream.end()
        told = _NUM_TOKENS.search(last)
        if not _FINISHED.search(last) or told is None:
            raise RequestError("the stream ended without a finish reason, or without its usage")
        # Several tokens may come at once.
        if int(told[1]) != self._arrival.request.num_output_tokens:
            raise RequestError(f"{int(told[1])} tokens came")
        return True


async def _check(head: bytes, reader: asyncio.StreamReader) -> None:
    status = int(head.split(maxsplit=2)[1])
    if status == HTTPStatus.OK:
        return
    retry_after = _RETRY_AFTER.search(head)
    if status == HTTPStatus.TOO_MANY_REQUESTS and retry_after is not None:
        raise _RefusedError(float(retry_after[1]))
    body = await reader.read()
    raise RequestError(f"{status}: {body[:_SHOWN_BYTES].decode(errors='replace')}")
