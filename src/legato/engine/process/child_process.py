"""A program of Legato in a process of its own, from its start to its end."""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from legato.core import signals


class ChildProcess:
    """A child process. Waits for its end are limited: a process stuck in the kernel may not end.

    The program must call `signals.leave_to_parent` first.

    Args:
        program: the command line; the file descriptor's number is added as the last argument.
        fd: the file descriptor that the process inherits.
        environment: variables for the process, unless this process has variables of these names.
    """

    def __init__(self, program: Sequence[str], fd: int, environment: Mapping[str, str]) -> None:
        with signals.held_back():
            self._process = _started(program, fd, environment)
        self._status = _reaped(self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill the process without waiting for its end."""
        self._process.kill()

    async def ends_within(self, seconds: float) -> bool:
        """Wait for the end, for so long at most; the process is reaped even if it ends later."""
        done, _ = await asyncio.wait([self._status], timeout=seconds)
        return bool(done)

    @property
    def end(self) -> str:
        """Exit status or signal, or that it has not ended: a process may be stuck in the kernel."""
        return status_words(self._status.result()) if self._status.done() else "it has not ended"


def status_words(status: int) -> str:
    """Name a status. Args: status: an exit status, or the negative number of a signal."""
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


def _started(
    program: Sequence[str], fd: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*program, str(fd)], pass_fds=[fd], env={**environment, **os.environ})


def _reaped(process: subprocess.Popen[bytes]) -> "asyncio.Future[int]":
    """Return a future of the exit status; a thread of its own waits for it."""
    loop = asyncio.get_running_loop()
    status: asyncio.Future[int] = loop.create_future()

    def wait() -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the status is not needed
            loop.call_soon_threadsafe(status.set_result, code)

    threading.Thread(target=wait, name=f"reaper of {process.pid}", daemon=True).start()
    return status
