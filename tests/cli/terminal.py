"""A program in a terminal, as a person at a keyboard runs it."""

import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import time

_PATIENCE_S = 60.0


class Terminal:
    """A new terminal, whose Ctrl-C goes to the program.

    Attributes:
        shown: what `wait_for` has not gone past.
    """

    def __init__(self, command: list[str]) -> None:
        self._keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=screen,
            stdout=screen,
            stderr=screen,
            preexec_fn=lambda: _take(screen),
        )
        os.close(screen)
        self.shown = b""

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def wait_for(self, text: bytes, *, typing: str = "") -> None:
        """Until it is shown.

        Args:
            typing: is typed now, and again while nothing comes: input() of CPython waits on where a
                signal comes just before it begins to.
        """
        deadline_s = time.monotonic() + _PATIENCE_S
        self.type(typing)
        while text not in self.shown:
            assert time.monotonic() < deadline_s, f"no {text!r} in {self.shown!r}"
            if select.select([self._keyboard], [], [], 1.0)[0]:
                self.shown += os.read(self._keyboard, 1 << 16)
            else:
                self.type(typing)
        self.shown = self.shown.partition(text)[2]


def _take(screen: int) -> None:
    os.setsid()
    fcntl.ioctl(screen, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where a shell runs tests with &
