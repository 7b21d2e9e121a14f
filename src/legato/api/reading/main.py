"""The zygote's program: `python -m legato.api.reading.main FD`, started by `ZygoteProcess`."""

import contextlib
import os
import socket
import sys

from legato.core.garbage import uncollected
from legato.core.logs import follow_logging
from legato.core.signals import leave_to_parent

# Libraries must not start threads: forked processes would lack them.
_SINGLE_THREADED = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}


def main(fd: int) -> int:
    leave_to_parent()
    follow_logging()
    os.environ.update(_SINGLE_THREADED)
    with uncollected():
        from legato.api.reading.zygote import Zygote
        from legato.engine.process.channel import ChannelClosedError

    with contextlib.suppress(ChannelClosedError):
        Zygote(socket.socket(fileno=fd)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
