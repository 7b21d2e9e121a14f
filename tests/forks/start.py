"""Starts programs of Legato, by forks where that comes to the same."""

import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import msgspec

from tests.forks.parent import MAX_BYTES, Start
from tests.forks.process import ForkedProcess

Process = ForkedProcess | subprocess.Popen[bytes]

_ROOT = Path(__file__).parents[2]
_PR_SET_CHILD_SUBREAPER = 36
# Libraries must not start threads: forked processes would lack them.
_SINGLE_THREADED = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
# Differs from test to test: pytest tells what runs, engines in this process their stacks, commands
# in this process their log, and PyTorch where it would keep what it compiles.
_OWN_VARIABLES = {
    "PYTEST_CURRENT_TEST", "RUST_MIN_STACK", "LEGATO_LOG_LEVEL", "LEGATO_LOG_FORMAT",
    "TORCHINDUCTOR_CACHE_DIR",
}  # fmt: skip


def start(
    *arguments: str,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: int = 2,
    pass_fds: Sequence[int] = (),
) -> Process:
    """Start `python -m` with these arguments, as `subprocess.Popen` does.

    The process is a fork unless this process's environment has changed, which libraries read when
    they are imported.

    Args:
        stdin, stdout, stderr: file descriptors.
    """
    parent = _parent() if sys.platform == "linux" else None
    if parent is not None and parent.environment == _environment():
        standard = dict(enumerate((stdin, stdout, stderr)))
        return parent.fork(arguments, standard | {fd: fd for fd in pass_fds})
    command = [sys.executable, "-m", *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds)


def run(
    *arguments: str, text: str = "", timeout_s: float | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run `python -m` with these arguments to its end.

    Args:
        text: the standard input.
        timeout_s: seconds until the program is killed, which raises `TimeoutExpired`.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        given, out, err = files
        given.write(text)
        given.seek(0)
        stdin, stdout, stderr = (file.fileno() for file in files)
        process = start(*arguments, stdin=stdin, stdout=stdout, stderr=stderr)
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), err.read())


class _Parent:
    """The process that forks, once for all tests of this one."""

    def __init__(self) -> None:
        self.environment = _environment()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks.parent", str(fd)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[fd], cwd=_ROOT,
                env=os.environ | _SINGLE_THREADED,
            )  # fmt: skip

    def fork(self, arguments: Sequence[str], fds: Mapping[int, int]) -> ForkedProcess:
        """Start a program. Args: fds: key its number in the new process, value its number here."""
        start = Start(arguments=[*arguments], folder=os.getcwd(), fds=[*fds])
        with open(os.devnull, "r+") as null, self._lock, _adopting_orphans():
            given = [null.fileno() if fd == subprocess.DEVNULL else fd for fd in fds.values()]
            socket.send_fds(self._socket, [msgspec.json.encode(start)], given)
            return ForkedProcess(int(self._socket.recv(MAX_BYTES)), arguments)


@cache
def _parent() -> _Parent:
    return _Parent()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Orphans become children of this process, not of the first in the system."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
