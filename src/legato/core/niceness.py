"""Niceness: the higher a thread's, the less it gets of a processor that others want, too."""

import os
import sys


def add_niceness(added: int, thread: int = 0) -> None:
    """Add to a thread's niceness, where threads have one of their own: on Linux.

    Args:
        thread: its id, which for a process's first thread is the process's; 0 is the caller's.

    Raises:
        ProcessLookupError: the thread has ended.
    """
    if sys.platform == "linux":
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness + added)
