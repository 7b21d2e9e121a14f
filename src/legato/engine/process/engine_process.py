"""One engine process, from its start to its end, and the messages to and from it."""

import asyncio
import contextlib
import logging
import math
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import psutil

from legato.core.config import EngineConfig
from legato.core.errors import ConfigError
from legato.core.memory_limits import address_space_bytes, advice
from legato.core.request import AbortRequest, AddRequest, Event
from legato.engine.errors import EngineDeadError
from legato.engine.process.channel import FrameDecoder, Pong, pack_frame
from legato.engine.process.child_process import ChildProcess
from legato.engine.process.engine_messages import (
    Control,
    EngineFailed,
    EngineInfo,
    EngineReady,
    FromEngine,
    LongStepBegins,
    StartPartEnded,
    StateReport,
    StepAnnounced,
    StepOutputs,
    Taken,
)
from legato.engine.process.pending import MAX_SENT, MAX_SENT_TOKENS, PendingRequests
from legato.engine.process.pulse import TICK_S, Pulse

logger = logging.getLogger(__name__)

_PROGRAM = (sys.executable, "-m", "legato.engine.main")
_READ_BYTES = 1 << 20
_STOP_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 5.0
_MAX_SILENT_LOADING = 300
"""As in `Pulse`: the disk may be slow, or other ranks may load more."""
SHORT_SPIN = {"GOMP_SPINCOUNT": "10000"}
"""How long an OpenMP thread spins for its next piece of work before it sleeps.

The default is thirty times as long. With it, the threads of a step hold cores that other threads
need, even the thread that they wait for: beside one busy process a step takes forty times as long
(docs/contributing/experiments.md). Without spinning, a step takes twice as long.
"""


class EngineProcess:
    """An engine process. Make it with `starting`, await `ready` before `send`, and `close` it last.

    Attributes:
        loading_s: seconds from the start until it was ready.
    """

    def __init__(
        self, process: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._frames = FrameDecoder(FromEngine)
        self._pending = PendingRequests[AddRequest]()
        self._sent = deque[int]()  # prompt tokens of sent requests that the engine has not taken
        self._started_s = time.monotonic()
        self._info: EngineInfo | None = None
        self.loading_s = 0.0

    @classmethod
    @contextlib.asynccontextmanager
    async def starting(
        cls, config: EngineConfig, program: Sequence[str] | None = None
    ) -> "AsyncGenerator[EngineProcess]":
        """Start an engine process, which begins to load; it is ended if the context raises.

        Args:
            program: the command of another kind of engine.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = ChildProcess(program or _PROGRAM, theirs.fileno(), SHORT_SPIN)
            reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(pack_frame(config))
        engine = cls(process, reader, writer)
        try:
            yield engine
        except BaseException:
            engine.abandon()
            await engine.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_pending(self) -> int:
        """Requests that wait to be sent, which the engine does not count."""
        return len(self._pending)

    @property
    def info(self) -> EngineInfo:
        """The engine's description, once it is ready."""
        assert self._info is not None, "it is not ready"
        return self._info

    async def ready(
        self,
        expected_s: float | None = None,
        on_part: Callable[[str, float], object] = lambda *_: None,
    ) -> EngineInfo:
        """Wait until the model is loaded.

        Args:
            expected_s: how long an earlier start took; None for the first, which has no bound while
                it computes.
            on_part: called with the name of each part of the start that ends, and its seconds.

        Raises:
            ConfigError: the settings or the checkpoint cannot be served.
            EngineDeadError: the process died while loading.
        """
        messages: list[Any] = []
        watching = asyncio.create_task(self._end_if_it_is_stuck(expected_s))
        try:
            while not messages:
                data = await self._reader.read(_READ_BYTES)
                if not data:
                    raise ConnectionResetError
                for message in self._frames.feed(data):
                    if isinstance(message, StartPartEnded):
                        on_part(message.name, message.seconds)
                    else:
                        messages.append(message)
        except OSError as lost:
            reason = "the engine process died while loading the model"
            if address_space_bytes() is not None:
                reason += f", perhaps for want of memory: {advice()}"
            raise EngineDeadError(reason) from lost
        finally:
            watching.cancel()
        match messages[0]:
            case EngineReady(info):
                self._info = info
                self.loading_s = time.monotonic() - self._started_s
                process_s = self.loading_s - sum(info.start_s.values())
                parts_s = {"process": process_s, **info.start_s}
                words = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts_s.items())
                logger.info("the engine is ready after %.2f s: %s", self.loading_s, words)
                return info
            case EngineFailed(error, is_user_error):
                raise ConfigError(error) if is_user_error else EngineDeadError(error)
        raise AssertionError(f"not what an engine begins with: {messages[0]!r}")

    def send(self, event: Event | Control) -> bool:
        """Send a message; if the process is gone, do nothing.

        Requests are sent by their tenants' turns, as many at a time as the engine takes between two
        steps, so that an abort is always among the next messages that the engine reads.

        Returns:
            False if a request was aborted before it was sent, so that the engine sees neither.
        """
        match event:
            case AddRequest():
                self._pending.add(event, event)
                self._send_pending()
            case AbortRequest(request_id=request_id) if self._pending.drop(request_id):
                return False
            case _:
                self._writer.write(pack_frame(event))
        return True

    async def steps(
        self,
    ) -> AsyncGenerator[StepAnnounced | LongStepBegins | StepOutputs | StateReport | Pong]:
        """Yield the outputs of each step, announcements, states and answers, until it ends."""
        try:
            while data := await self._reader.read(_READ_BYTES):
                for message in self._frames.feed(data):
                    match message:
                        case EngineFailed():
                            logger.error("the engine gives up: %s", message.error)
                        case Taken(num_requests):
                            for _ in range(num_requests):
                                self._sent.popleft()
                            self._send_pending()
                        case _:
                            yield message
        except OSError as error:
            logger.error("lost the connection to the engine process: %s", error)

    async def _end_if_it_is_stuck(self, expected_s: float | None) -> None:
        """Kill the process if it loads for far too long, or computes nothing for very long."""
        pulse = Pulse(self.pid, _MAX_SILENT_LOADING, max_unanswered=_MAX_SILENT_LOADING)
        pulse.note_step(math.inf if expected_s is None else expected_s)
        while not pulse.is_stuck:
            await asyncio.sleep(TICK_S)
            pulse.tick()
        logger.error("the engine process %s while it loads: it is killed", pulse.complaint)
        self.abandon()

    def _send_pending(self) -> None:
        num_tokens = sum(self._sent)
        for request in self._pending.take(MAX_SENT - len(self._sent), MAX_SENT_TOKENS - num_tokens):
            self._sent.append(len(request.prompt_token_ids))
            self._writer.write(pack_frame(request))

    async def close(self) -> str:
        """End the process if it still runs; return its exit status in words.

        A process that cannot be killed is left behind, and reaped if it ends later.
        """
        self._writer.close()
        if not await self._process.ends_within(_STOP_TIMEOUT_S):
            self.abandon()
            if not await self._process.ends_within(_KILL_TIMEOUT_S):
                logger.error("the engine process %d cannot be ended and is left behind", self.pid)
                return "it cannot be ended"
        return self._process.end

    def abandon(self) -> None:
        """Kill the process and its ranks, and end `steps`, without waiting for any of them.

        A rank that the system has stopped would not see the end of its engine.
        """
        ranks = list[psutil.Process]()
        with contextlib.suppress(psutil.Error):
            ranks = psutil.Process(self.pid).children(recursive=True)
        self._process.kill()
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.kill()
        # Closing would first wait for the process to read what was sent.
        self._writer.transport.abort()
