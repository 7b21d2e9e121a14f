"""Other programs that want the processor."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SPIN = """
import sys, time
share, period_s = float(sys.argv[1]), 0.1
begin_s = time.perf_counter()
while True:
    while time.perf_counter() < begin_s + share * period_s:
        pass
    begin_s += period_s
    time.sleep(max(0.0, begin_s - time.perf_counter()))
"""


@contextmanager
def spinning(num_processes: int, share: float = 1.0) -> Iterator[None]:
    """Run so many processes that only spin, until the block ends.

    Args:
        share: of each tenth of a second in which they do.
    """
    command = (sys.executable, "-c", _SPIN, str(share))
    processes = [subprocess.Popen(command) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
