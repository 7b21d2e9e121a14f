"""One engine process, from its start to its end, and the messages to and from it."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

from legato.core.config import EngineConfig
from legato.core.errors import ConfigError
from legato.core.request import Event
from legato.engine.errors import EngineDeadError
from legato.engine.process.channel import FrameDecoder, pack_frame
from legato.engine.process.messages import (
    Control,
    EngineFailed,
    EngineInfo,
    EngineReady,
    FromEngine,
    StepOutputs,
)

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_STOP_TIMEOUT_S = 5.0
_SHORT_SPIN = {"GOMP_SPINCOUNT": "10000"}
"""How long an OpenMP thread spins for its next piece of work before it sleeps.

At the default, thirty times as long, the threads of a step hold cores that others need, and that
includes the thread they wait for: beside one busy process a step takes forty times as long
(docs/experiments.md). Not spinning at all doubles the length of a step.
"""


class EngineProcess:
    """Made by `open`; `ready` comes before anything is sent, and `close` last."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._frames = FrameDecoder(FromEngine)

    @classmethod
    async def open(cls, config: EngineConfig) -> "EngineProcess":
        """Start an engine process; its model is still to be loaded."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "legato.engine.process.main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_SHORT_SPIN | os.environ,
            )
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            process.kill()
            process.wait()
            raise
        writer.write(pack_frame(config))
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> EngineInfo:
        """Wait until the model is loaded.

        Raises:
            ConfigError: the settings or the checkpoint cannot be served.
            EngineDeadError: the process died while loading.
        """
        messages: list[Any] = []
        try:
            while not messages:
                data = await self._reader.read(_READ_BYTES)
                if not data:
                    raise ConnectionResetError
                messages = self._frames.feed(data)
        except OSError as lost:
            raise EngineDeadError("the engine process died while loading the model") from lost
        match messages[0]:
            case EngineReady(info):
                return info
            case EngineFailed(error, is_user_error):
                raise ConfigError(error) if is_user_error else EngineDeadError(error)
        raise AssertionError(f"not what an engine begins with: {messages[0]!r}")

    def send(self, event: Event | Control) -> None:
        """To a process that is gone, nothing is sent."""
        self._writer.write(pack_frame(event))

    async def steps(self) -> AsyncIterator[StepOutputs]:
        """What each step brought, until the process ends."""
        try:
            while data := await self._reader.read(_READ_BYTES):
                for message in self._frames.feed(data):
                    if isinstance(message, EngineFailed):
                        logger.error("the engine gives up: %s", message.error)
                    else:
                        yield message
        except OSError as error:
            logger.error("lost the connection to the engine process: %s", error)

    async def close(self) -> str:
        """End the process, if it still runs; returns how it ended."""
        self._writer.close()
        try:
            status = await asyncio.to_thread(self._process.wait, _STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return f"status {status}" if status >= 0 else signal.Signals(-status).name

    def abandon(self) -> None:
        """End the process, and `steps`, without waiting: it may hang where no signal gets."""
        self._process.kill()
        self._writer.close()

    def kill(self) -> None:
        """End the process at once."""
        self.abandon()
        self._process.wait()
