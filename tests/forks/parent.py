"""Imports what Legato's programs need, and forks them: `python -m tests.forks.parent FD`.

A child becomes the child of the process that asked for it, which adopts orphans meanwhile.
"""

import fcntl
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import msgspec

from legato.api.reading import zygote
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL, ModelConfig
from legato.core.signals import leave_to_parent
from legato.language.tokenizer import loading
from tests.forks.children import fork_children, fork_servers
from tests.forks.process import run_program

_MODULES = (
    "legato.cli.main",
    "legato.cli.serve",
    "legato.engine.build.builder",
    "legato_lab.commands.bench",
    "legato.api.http_server",
    "legato.api.run",
    "legato.api.reading.zygote",
    "transformers",
)
MAX_BYTES = 2**16
MAX_FDS = 8


class Start(msgspec.Struct):
    """A program to start.

    Attributes:
        arguments: as `python -m` takes them.
        fds: numbers that the file descriptors beside this message have in the new process.
    """

    arguments: list[str]
    folder: str
    fds: list[int]


def main(fd: int) -> None:
    """Fork until the tests end; a child runs its program and ends with it."""
    leave_to_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # an engine's start holds signals back
    for name in _MODULES:
        import_module(name)
    _know_default_text()
    gc.collect()
    gc.freeze()  # or a collection in a child would copy all pages that it visits
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "a fork would lack the other threads"
    with socket.socket(fileno=fd) as sock:
        start = _next_start(sock)
    if start is not None:
        os.chdir(start.folder)
        fork_children()
        if start.arguments[0] == "legato":  # a soak measures the memory of a server alone
            fork_servers()
        run_program(start.arguments)


def _know_default_text() -> None:
    """Load the default model's tokenizer, a fifth of a server's start, once for all forks."""
    source = resolve_source(DEFAULT_MODEL)
    default = loading.text_source(ModelConfig(), source)
    load, known = loading.load_text, loading.load_text(default)
    zygote.load_text = lambda source: known if source == default else load(source)


def _next_start(sock: socket.socket) -> Start | None:
    """Return the next program, each in a new process; in this one, None once the tests end."""
    while True:
        data, fds, _, _ = socket.recv_fds(sock, MAX_BYTES, MAX_FDS)
        if not data:
            return None
        start = msgspec.json.decode(data, type=Start)
        pid = _forked_orphan()
        if not pid:
            _renumber(fds, start.fds)
            return start
        for fd in fds:
            os.close(fd)
        sock.send(str(pid).encode())


def _forked_orphan() -> int:
    """Fork a process whose parent has ended; return its id, and 0 in it."""
    told, tells = os.pipe()
    parent = os.fork()
    if not parent:
        pid = os.fork()
        if pid:
            os.write(tells, str(pid).encode())
            os._exit(0)
    os.close(tells)
    if not parent:
        os.close(told)
        return 0
    os.waitpid(parent, 0)
    with open(told) as file:
        return int(file.read())


def _renumber(fds: Sequence[int], numbers: Sequence[int]) -> None:
    out_of_the_way = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1 + max(numbers)) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(out_of_the_way, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


if __name__ == "__main__":
    main(int(sys.argv[1]))
