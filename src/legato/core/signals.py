"""The signals that ask a server to end, which reach all processes of its group.

Ending is the server's decision: its children ignore these, and end when it does.
"""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_back() -> Iterator[None]:
    """None reaches a process started meanwhile, which is to call `leave_to_parent`."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def leave_to_parent() -> None:
    """Ignore them from now on."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def call_when_ending(handle: Callable[[int], object]) -> None:
    """Have the running event loop call `handle` with the number of each that comes."""
    loop = asyncio.get_running_loop()
    for number in ENDING:
        # `nohup` has it ignored.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, handle, number)
