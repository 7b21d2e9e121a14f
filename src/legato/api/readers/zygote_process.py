"""The HTTP server's side of the zygote."""

import asyncio
import itertools
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from legato.api.readers.reader_messages import (
    Fork,
    FromZygote,
    LoadFailed,
    LoadText,
    ReaderEnded,
    TextLoaded,
    ToZygote,
)
from legato.api.readers.reader_process import ReaderProcess
from legato.core.errors import ConfigError
from legato.engine.errors import EngineDeadError
from legato.engine.process.channel import FrameDecoder, Ping, Pong, pack_frame
from legato.engine.process.child_process import ChildProcess
from legato.engine.process.pulse import TICK_S, Pulse

logger = logging.getLogger(__name__)

_PROGRAM = (sys.executable, "-m", "legato.api.reading.main")
_READ_BYTES = 1 << 18
_STOP_TIMEOUT_S = 5.0
_STATUS_TIMEOUT_S = 1.0
_MAX_SILENT = 5
_MAX_SILENT_LOADING = 60  # a disk may be slow
_MAX_UNANSWERED = 60  # a fork takes milliseconds
_MAX_UNANSWERED_LOADING = 600
_numbers = itertools.count()  # unique among all zygotes' readers


class ZygoteProcess:
    """A zygote process, told what to load.

    Attributes:
        lost: done once it is gone.
        was_stuck: whether it was killed because it did not answer.
    """

    def __init__(self, asked: LoadText) -> None:
        self.was_stuck = False
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loaded: asyncio.Future[TextLoaded] = asyncio.get_running_loop().create_future()
        self._frames = FrameDecoder(FromZygote)
        self._unsent: deque[tuple[bytes, list[int]]] = deque()  # each with its descriptors
        self._statuses: dict[int, asyncio.Future[int]] = {}  # key: number of a running reader
        self._started_s = time.monotonic()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = ChildProcess(_PROGRAM, theirs.fileno(), {})
        asyncio.get_running_loop().add_reader(self._socket, self._receive)
        self.send(asked)
        self._pulse = Pulse(self._process.pid, _MAX_SILENT_LOADING, _MAX_UNANSWERED_LOADING)
        self._watching = asyncio.create_task(self._kill_if_stuck())

    @property
    def is_suspect(self) -> bool:
        """Whether it may be stuck, and is about to be killed."""
        return self._pulse.is_suspect

    async def loaded(self) -> TextLoaded:
        """Wait until it can fork.

        Raises:
            ConfigError: the checkpoint's tokenizer cannot be used.
            EngineDeadError: the process died while loading it.
        """
        return await asyncio.shield(self._loaded)

    def send(self, message: ToZygote, fds: Sequence[int] = ()) -> None:
        """Send a message, now or once the zygote reads on, unless it is gone.

        Raises:
            OSError: there are no free descriptors for copies of `fds`.
        """
        if self.lost.done():
            return
        self._unsent.append((pack_frame(message), [os.dup(fd) for fd in fds]))
        if len(self._unsent) == 1:
            self._send_on()

    def _send_on(self) -> None:
        """Send what the socket takes; the rest follows when it takes more."""
        loop = asyncio.get_running_loop()
        loop.remove_writer(self._socket)
        while self._unsent:
            frame, fds = self._unsent[0]
            try:
                num_bytes = socket.send_fds(self._socket, [frame], fds)
            except BlockingIOError:
                num_bytes = 0
            except OSError:
                self._lose()
                return
            if num_bytes:  # descriptors go with the first byte
                self._unsent[0] = frame[num_bytes:], []
                for fd in fds:
                    os.close(fd)
            if num_bytes < len(frame):
                loop.add_writer(self._socket, self._send_on)
                return
            self._unsent.popleft()

    async def fork(self, niceness: int) -> ReaderProcess | None:
        """Fork a reader; return None if that fails, for example because the zygote is gone."""
        number = next(_numbers)
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # no free descriptors
            logger.error("no process can be forked: %s", error)
            return None
        with theirs:
            reader = ReaderProcess(number, *await asyncio.open_connection(sock=ours))
            try:
                self.send(Fork(number, niceness), [theirs.fileno()])
            except OSError as error:
                logger.error("no process can be forked: %s", error)
                reader.close()
                return None
            self._statuses[number] = reader.status
        try:
            if await reader.begun():
                return reader
        except asyncio.CancelledError:
            reader.close()
            raise
        reader.close()
        return None

    async def status(self, reader: ReaderProcess) -> int | None:
        """Return the exit status of a lost reader, as in `ReaderEnded`; None if unknown."""
        told: list[asyncio.Future[Any]] = [reader.status, self.lost]
        await asyncio.wait(told, timeout=_STATUS_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        return reader.status.result() if reader.status.done() else None

    async def close(self) -> None:
        """End it and all its readers."""
        self._watching.cancel()
        self._lose()
        if not await self._process.ends_within(_STOP_TIMEOUT_S):
            self._process.kill()
            await self._process.ends_within(_STOP_TIMEOUT_S)

    async def _kill_if_stuck(self) -> None:
        while not self._pulse.is_stuck:
            await asyncio.sleep(TICK_S)
            self.send(Ping())
            self._pulse.tick()
        logger.error("the process that forks readers %s: it is killed", self._pulse.complaint)
        self.was_stuck = True
        self._process.kill()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        for message in self._frames.feed(data):
            match message:
                case TextLoaded():
                    seconds = time.monotonic() - self._started_s
                    logger.info("the tokenizer is loaded after %.2f s", seconds)
                    self._loaded.set_result(message)
                    self._pulse = Pulse(self._process.pid, _MAX_SILENT, _MAX_UNANSWERED)
                case LoadFailed(error, is_user_error):
                    failure = ConfigError if is_user_error else EngineDeadError
                    self._loaded.set_exception(failure(error))
                case ReaderEnded(number, status):
                    self._statuses.pop(number).set_result(status)
                case Pong():
                    self._pulse.note_answer()

    def _lose(self) -> None:
        if self.lost.done():
            return
        self.lost.set_result(None)
        asyncio.get_running_loop().remove_reader(self._socket)
        asyncio.get_running_loop().remove_writer(self._socket)
        self._socket.close()
        for _, fds in self._unsent:
            for fd in fds:
                os.close(fd)
        self._unsent.clear()
        if not self._loaded.done():
            error = EngineDeadError("the process that loads the tokenizer died")
            self._loaded.set_exception(error)
            self._loaded.exception()  # avoids a warning if nothing awaits it
