"""Telling that whoever is at the other end of a socket is gone, while something else is awaited."""

import os
import select
import socket
import threading
from collections.abc import Callable, Iterable


def on_hang_up(sockets: Iterable[socket.socket], act: Callable[[], None]) -> None:
    """Have `act` called by a thread of its own, once, when the first of them has no other end."""
    # Of its own, so that they stay what they are when the sockets are closed here.
    copies = [os.dup(sock.fileno()) for sock in sockets]
    threading.Thread(target=_wait, args=(copies, act), name="hang-up", daemon=True).start()


def _wait(fds: list[int], act: Callable[[], None]) -> None:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, 0)  # hanging up is always told
    poller.poll()
    act()
    for fd in fds:
        os.close(fd)
