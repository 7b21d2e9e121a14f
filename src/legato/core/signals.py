"""The signals that ask a server to end. They reach all processes of its group.

The server decides when to end: its children ignore these signals, and end with it.
"""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_back() -> Iterator[None]:
    """Block the signals for processes started inside, which must call `leave_to_parent`."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def leave_to_parent() -> None:
    """Ignore the signals from now on."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def call_when_ending(handle: Callable[[int], object]) -> None:
    """Make the running event loop call `handle` with the number of each such signal."""
    loop = asyncio.get_running_loop()
    for number in ENDING:
        # Under `nohup`, SIGHUP is ignored.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, handle, number)
