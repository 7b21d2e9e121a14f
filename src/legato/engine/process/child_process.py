"""A program of Legato's in a process of its own, from its start to its end."""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from legato.core import signals


class ChildProcess:
    """Nothing waits for its end without a limit: a process stuck in the kernel ends at no signal.

    The program is to call `signals.leave_to_parent` first.

    Args:
        program: the command line; the number of the file that is handed to it comes behind.
        fd: the file that it is handed.
        environment: variables that it gets where this process has no others of that name.
    """

    def __init__(self, program: Sequence[str], fd: int, environment: Mapping[str, str]) -> None:
        with signals.held_back():
            self._process = subprocess.Popen(
                [*program, str(fd)], pass_fds=[fd], env={**environment, **os.environ}
            )
        self._status = _reaped(self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Without waiting for the end."""
        self._process.kill()

    async def ends_within(self, seconds: float) -> bool:
        """Wait for the end, for so long at most; it is reaped, however late it comes."""
        done, _ = await asyncio.wait([self._status], timeout=seconds)
        return bool(done)

    @property
    def end(self) -> str:
        """How it ended, once it has."""
        return status_words(self._status.result())


def status_words(status: int) -> str:
    """Args: status: of an exit, or the negative number of a signal."""
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


def _reaped(process: subprocess.Popen[bytes]) -> "asyncio.Future[int]":
    """The status that the process ends with, however late; a thread of its own waits for it."""
    loop = asyncio.get_running_loop()
    status: asyncio.Future[int] = loop.create_future()

    def wait() -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(status.set_result, code)

    threading.Thread(target=wait, name=f"reaper of {process.pid}", daemon=True).start()
    return status
