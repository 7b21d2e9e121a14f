"""Reads bodies in other processes: a zygote, and readers that it forks."""

import asyncio
import contextlib
import logging
import signal
from collections import Counter
from functools import partial

from legato.api.arrival import Arrival
from legato.api.bodies.body_model import Kind, Serving
from legato.api.http.errors import ApiError, out_of_memory, readers_dead
from legato.api.job import Job, Piece, Refused, Warned
from legato.api.limits import LARGE_BODY_BYTES, MAX_READERS
from legato.api.readers.lane import PATIENCE_S, Lane, ReaderPlace
from legato.api.readers.reader_messages import QUICK_NICENESS, SLOW_NICENESS, LoadText, Serve
from legato.api.readers.reader_process import ReaderLostError, ReaderProcess, Reading
from legato.api.readers.zygote_process import ZygoteProcess
from legato.checkpoint.defaults import ModelDefaults
from legato.core.control_groups import usable_cores
from legato.core.errors import InvalidRequestError
from legato.core.tenant import DEFAULT_TENANT
from legato.core.vocabulary import Vocabulary
from legato.engine.errors import RequestFailedError
from legato.engine.process.child_process import status_words
from legato.engine.process.pulse import TICK_S
from legato.language.tokenizer.loading import TextSource

logger = logging.getLogger(__name__)

_NUM_ATTEMPTS = 2
_QUICK_S = 0.03
"""Processor time; a body that takes more is slow. A busy machine makes none slow."""
_MAX_LOOKS = 20  # at a reader that may be stopped
_RESTART_TIMEOUT_S = 30.0
_RESTART_PAUSE_S = 1.0
_FORK_PAUSE_S = 0.1


def _taken_note_of(reading: "asyncio.Task[Reading]") -> None:
    if not reading.cancelled():
        reading.exception()


async def _is_quick(reading: "asyncio.Task[Reading]", reader: ReaderProcess) -> bool:
    """Wait until a body is read, or turns out to be slow; return False for that."""
    begun_s = reader.processor_time_s()
    for _ in range(_MAX_LOOKS):
        await asyncio.wait([reading], timeout=PATIENCE_S)
        if reading.done():
            return True
        if reader.processor_time_s() - begun_s > _QUICK_S:
            break
    return False


class _NoPlaceError(Exception):
    """A body is slow, and its tenant may have no more places for slow bodies."""


class TextProcesses:
    """Reads bodies in other processes, so that the event loop only passes bytes on.

    A reader that takes too long or too much memory costs only its own request. One that dies
    otherwise, or neither answers nor computes, is replaced, and its body read again, once. The
    zygote is replaced likewise, while its readers continue.

    Large bodies are read in a lane of their own at a low priority. A body that turns out to be slow
    moves there: with its reader if its tenant may take another place there; otherwise it waits
    there to be read again.

    Args:
        timeout_s: of processor time for one body.

    Attributes:
        num_stuck: processes that were killed because they did not answer; key
            "reader" or "zygote".
    """

    def __init__(self, source: TextSource, timeout_s: float) -> None:
        self._asked = LoadText(source, timeout_s)
        self._timeout_s = timeout_s
        self._zygote = ZygoteProcess(self._asked)
        self._is_ready = asyncio.Event()
        # More readers than processors only take time from the engine. The second of two is for
        # another tenant.
        num_quick = min(MAX_READERS, max(2, usable_cores()))
        self._quick = Lane(partial(self._fork, QUICK_NICENESS), num_quick)
        self._slow = Lane(partial(self._fork, SLOW_NICENESS), MAX_READERS)
        self._running: asyncio.Task[None] | None = None
        self._num_suspects = 0  # readers that may be stuck
        self.num_stuck = Counter[str](reader=0, zygote=0)

    @property
    def problem(self) -> str:
        """Why reading takes longer at the moment; empty if nothing is wrong."""
        if not self._is_ready.is_set():
            return "the process that forks readers is being started again"
        if self._zygote.is_suspect:
            return "the process that forks readers does not answer"
        return "a process that reads requests does not answer" if self._num_suspects else ""

    async def loaded(self) -> tuple[Vocabulary, ModelDefaults]:
        """Wait until the text is loaded; return the vocabulary and the model's defaults.

        Raises:
            ConfigError: the checkpoint's tokenizer cannot be used.
            EngineDeadError: the process died while loading it.
        """
        loaded = await self._zygote.loaded()
        if loaded.template_problem is not None:
            logger.warning("no chat: %s", loaded.template_problem)
        return loaded.vocabulary, loaded.defaults

    async def serve(self, serving: Serving) -> None:
        """Start reading bodies."""
        self._zygote.send(Serve(serving))
        self._is_ready.set()
        self._running = asyncio.create_task(self._keep_running(serving))
        await self._quick.warm_up(DEFAULT_TENANT)

    async def job(self, kind: Kind, body: bytearray, arrival: Arrival) -> Job:
        """Return the job of a body.

        Raises:
            ApiError: the reader refused it.
            InvalidRequestError: it took too much time or memory.
            OverloadedError: too many bodies are waiting.
            RequestFailedError: readers die over it for another reason.
        """
        _, job = await self.read(kind, body, arrival)
        assert isinstance(job, Job)
        return job

    async def answer(self, kind: Kind, body: bytearray, arrival: Arrival) -> list[bytes]:
        """Return the pieces of the whole answer to a body, in JSON.

        Raises:
            Exception: as `job`.
        """
        parts, _ = await self.read(kind, body, arrival)
        return [part.data for part in parts if isinstance(part, Piece)]

    async def read(
        self, kind: Kind, body: bytearray, arrival: Arrival, stored: bytes | None = None
    ) -> Reading:
        """Read a body; return its parts and end, which is not `Refused`.

        Args:
            arrival: of the body; its API key's tenant shares places, since a tenant that the body
                itself names is known only after reading. It gets the reader's warnings.
            stored: the responses that the body needs, if its end was `NeedsStored`.

        Raises:
            Exception: as `job`.
        """
        for _ in range(_NUM_ATTEMPTS):
            try:
                tenant = arrival.tenant or DEFAULT_TENANT
                parts, end = await self._read(kind, body, tenant, stored)
            except ReaderLostError as lost:
                logger.warning("a process died while it read a request: %s", lost)
                continue
            if isinstance(end, Refused):
                raise ApiError(end.status, end.detail)
            for part in parts:
                if isinstance(part, Warned):
                    arrival.warn(part.text)
            return parts, end
        raise RequestFailedError("the processes that read this request died")

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running
        for lane in (self._quick, self._slow):
            lane.end_idle()
        await self._zygote.close()

    async def _read(
        self, kind: Kind, body: bytearray, tenant: str, stored: bytes | None
    ) -> Reading:
        num_bytes = len(body) + len(stored or b"")
        if num_bytes <= LARGE_BODY_BYTES:
            with contextlib.suppress(_NoPlaceError):
                async with self._quick.place(tenant, num_bytes) as place:
                    return await self._read_at(place, kind, body, stored)
        async with self._slow.place(tenant, num_bytes) as place:
            return await self._read_at(place, kind, body, stored)

    async def _read_at(
        self, place: ReaderPlace, kind: Kind, body: bytearray, stored: bytes | None
    ) -> Reading:
        """Read a body while its reader computes and has a place."""
        reader, zygote = place.reader, self._zygote
        reading = asyncio.create_task(reader.read(kind, body, stored))
        reading.add_done_callback(_taken_note_of)  # avoids a warning for a task that is not awaited
        try:
            if place.lane is self._quick and not await _is_quick(reading, reader):
                if not self._slow.moved(place):
                    raise _NoPlaceError
                reader.lower()
            await self._watched(reading, reader)
            return reading.result()
        except ReaderLostError:
            raise self._cause(await zygote.status(reader)) from None
        finally:
            if not reading.done():
                reader.kill()  # its client has disconnected, or it has no place
                reading.cancel()

    async def _watched(self, reading: "asyncio.Task[Reading]", reader: ReaderProcess) -> None:
        """Wait until a body is read.

        Raises:
            ReaderLostError: the reader was stuck, and was killed along with all idle ones.
        """
        pulse = reader.pulse()
        try:
            while True:
                await asyncio.wait([reading], timeout=TICK_S)
                if reading.done():
                    return
                self._num_suspects -= pulse.is_suspect
                pulse.tick()
                self._num_suspects += pulse.is_suspect
                if pulse.is_stuck:
                    break
        finally:
            self._num_suspects -= pulse.is_suspect
        logger.error("a process that reads neither answers nor computes: it is killed")
        self.num_stuck["reader"] += 1
        reader.kill()
        for lane in (self._quick, self._slow):
            lane.end_idle()  # they may be stuck for the same reason
        raise ReaderLostError

    def _cause(self, status: int | None) -> Exception:
        """Return the error for a lost reader's exit status, as in `ReaderEnded`."""
        if status is None:
            return ReaderLostError("nobody knows of what")
        if status == -signal.SIGPROF:
            return InvalidRequestError(
                f"reading this request takes more than {self._timeout_s:g} s of processor time "
                "(--timeout-prompt)"
            )
        if status == -signal.SIGABRT:  # tokenizers aborts if it runs out of memory
            return out_of_memory()
        if status == -signal.SIGSEGV:  # endless recursion in a grammar compiler
            return InvalidRequestError("this request is nested too deeply")
        return ReaderLostError(status_words(status))

    async def _fork(self, niceness: int) -> ReaderProcess:
        try:
            async with asyncio.timeout(_RESTART_TIMEOUT_S):
                while True:
                    await self._is_ready.wait()
                    reader = await self._zygote.fork(niceness)
                    if reader is not None:
                        return reader
                    await asyncio.sleep(_FORK_PAUSE_S)
        except TimeoutError:
            raise readers_dead() from None

    async def _keep_running(self, serving: Serving) -> None:
        while True:
            await asyncio.wait([self._zygote.lost])
            self._is_ready.clear()
            self.num_stuck["zygote"] += self._zygote.was_stuck
            logger.error("the process that forks readers died; another is started")
            await self._zygote.close()
            self._zygote = await self._started()
            try:
                await self._zygote.loaded()
            except Exception as error:
                logger.error("it cannot be started: %s", error)
                await asyncio.sleep(_RESTART_PAUSE_S)
                continue
            self._zygote.send(Serve(serving))
            self._is_ready.set()

    async def _started(self) -> ZygoteProcess:
        """Start another zygote, as soon as the system has descriptors and a process for it."""
        while True:
            try:
                return ZygoteProcess(self._asked)
            except OSError as error:
                logger.error("it cannot be started: %s", error)
                await asyncio.sleep(_RESTART_PAUSE_S)
