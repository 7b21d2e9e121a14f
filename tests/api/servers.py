"""Servers that tests share: one for each set of flags."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.api.launch import ServerProcess, running_server
from tests.exact import EXACT

DRAFTING = (*EXACT, "--speculative", "8", "--no-calibrate")
TRUSTING = (*EXACT, "--trust-request-chat-template")
FEW_UNREAD = 50
PROMISING = (
    "--itl-slo", "61s", "--ttft-slo", "600s", "--slo-class", "hasty:ttft=50ms",
    "--slo-class", "second:ttft=1s",
    "--slo-class", "hopeless:itl=0.001ms,tpot=0.001ms", "--shed-load", "--no-calibrate",
    "--max-num-seqs", "2", "--max-waiting", "2", "--max-num-batched-tokens", "256",
    "--calibration-dir", "no-such-folder",
)  # fmt: skip
GUARDED = (*EXACT, "--message-special-tokens", "refuse", "--max-unread-tokens", str(FEW_UNREAD))
LENIENT = (*EXACT, "--unknown-fields", "ignore", "--max-model-len", "256")


class Servers:
    """Starts a server when a test first asks for its flags, and keeps it for later tests.

    A test that kills, stops, reconfigures, fills or times a server starts one of its own, with
    `running_server`.

    Args:
        make_folder: returns a new folder for a server's log.
        most: servers that run at a time; beyond that, the least recently used is stopped. A module
            may use as many.
    """

    def __init__(self, make_folder: Callable[[], Path], most: int = 3) -> None:
        self._make_folder = make_folder
        self._most = most
        self._running: OrderedDict[tuple[str, ...], tuple[ServerProcess, ExitStack]] = OrderedDict()

    def get(self, *flags: str) -> ServerProcess:
        """The server with exactly these flags; a test fails that finds it dead."""
        if flags not in self._running:
            self._start(flags)
        self._running.move_to_end(flags)
        server, _ = self._running[flags]
        assert server.process.poll() is None, f"the server is gone:\n{server.log.read_text()}"
        return server

    def stop(self) -> None:
        """Stop all."""
        while self._running:
            self._stop_oldest()

    def _start(self, flags: tuple[str, ...]) -> None:
        while len(self._running) >= self._most:
            self._stop_oldest()
        stack = ExitStack()
        server = stack.enter_context(running_server(self._make_folder(), *flags))
        self._running[flags] = server, stack

    def _stop_oldest(self) -> None:
        _, (_, stack) = self._running.popitem(last=False)
        stack.close()
