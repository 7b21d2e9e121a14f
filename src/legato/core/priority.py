"""Which threads go first."""

import os
import sys
import threading


def lower_this_thread(by: int) -> None:
    """Make the calling thread, and those that it starts, nicer; where the system can, Linux."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + by)
