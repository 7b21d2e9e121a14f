"""A forked process, and a program that runs in it."""

import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

_MAX_NAME_CHARS = 15
"""The kernel cuts the names of processes."""


class ForkedProcess:
    """A child of this process, with the methods of `subprocess.Popen` that are used.

    Attributes:
        args: what `python -m` would have taken.
        returncode: None until it is known that the process has ended.
    """

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid = pid
        self.args = args
        self.returncode: int | None = None
        self._fd = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, or None if the process runs."""
        with self._lock:
            if self.returncode is None and _is_readable(self._fd, 0.0):
                try:
                    _, status = os.waitpid(self.pid, 0)
                except ChildProcessError:  # reaped elsewhere, as by psutil
                    status = 0
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._fd)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, once the process has ended."""
        fd = os.dup(self._fd) if self.poll() is None else None
        if fd is not None:
            try:
                if not _is_readable(fd, timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            finally:
                os.close(fd)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def runs(process: psutil.Process, module: str) -> bool:
    """Whether the process runs a module as its program."""
    return module in process.cmdline() or process.name() == _name(module)


def run_program(arguments: Sequence[str]) -> None:
    """Run what `python -m` would run. The process must be new, and ends with the program."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module, *sys.argv[1:] = arguments
    Path("/proc/self/comm").write_text(_name(module))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _name(module: str) -> str:
    return module[-_MAX_NAME_CHARS:]


def _is_readable(fd: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))
