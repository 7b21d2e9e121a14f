"""Ranks as threads of one process: all else is as it is with processes."""

import socket
import threading
from typing import Any

import pytest

from legato.engine.build.ranks import processes
from legato.engine.build.ranks.main import _follow
from legato.engine.build.ranks.rank_start import FromLead
from legato.engine.process.channel import Channel, ChannelClosedError
from legato.model.communicator import RankLostError


class _Thread:
    """What stands for a `Popen`."""

    def __init__(self, fd: int) -> None:
        sock = socket.socket(fileno=fd)
        self._thread = threading.Thread(target=self._run, args=(sock,), daemon=True)
        self._thread.start()

    def _run(self, sock: socket.socket) -> None:
        with sock:
            try:
                _follow(Channel(sock, FromLead), sock)
            except (ChannelClosedError, RankLostError):
                return

    def kill(self) -> None:
        """It ends without its socket."""

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


def _started(fd: int) -> Any:
    return _Thread(socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_STREAM).detach())


@pytest.fixture
def ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_started", _started)
