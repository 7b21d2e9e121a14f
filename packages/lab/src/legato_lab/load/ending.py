"""Ends the servers of a program with the program."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a program at once, unless it handles them."""


@contextmanager
def closing_when_ended() -> Iterator[None]:
    """Let a signal end the block by `SystemExit`, so that all context managers in it close.

    Servers have sessions of their own and would otherwise outlive the program. Only the first
    signal counts: another one must not interrupt the closing.
    """
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number in _ENDING:
        if before[number] is not signal.SIG_IGN:  # SIGHUP under `nohup`
            signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)
