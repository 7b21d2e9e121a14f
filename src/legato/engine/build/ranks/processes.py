"""The processes of the ranks above 0, seen from rank 0."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
import weakref
from typing import Any

from legato.core import signals
from legato.core.config import EngineConfig
from legato.core.errors import ConfigError
from legato.engine.build.ranks.rank_start import BeRank, FromLead, FromRank, RankReady
from legato.engine.process.channel import Channel, ChannelClosedError, on_hang_up
from legato.engine.process.engine_messages import EngineFailed
from legato.engine.process.engine_process import SHORT_SPIN
from legato.executor.ranks.rank_messages import RankReport, ToRank
from legato.model.communicator import RankLostError

logger = logging.getLogger(__name__)

_PROGRAM = (sys.executable, "-m", "legato.engine.build.ranks.main")
_KILL_TIMEOUT_S = 2.0
_GRACE_S = 1.0
"""Time for this process to fail by itself, and to log the cause."""


class RankProcesses:
    """`Followers` over socket pairs; the processes end with this object, and with this process.

    Args:
        config: with every "auto" replaced.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._channels: list[Channel] = []
        self._sockets = sockets = list[socket.socket]()
        processes: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _end, sockets, processes)
        for rank in range(1, config.model.tensor_parallel_size):
            ours, theirs = socket.socketpair()
            sockets.append(ours)
            self._channels.append(Channel(ours, FromRank))
            with theirs:
                processes.append(_started(theirs.fileno()))
            self._channels[-1].send(BeRank(config, rank))

    def broadcast(self, message: FromLead | ToRank) -> None:
        try:
            for channel in self._channels:
                channel.send(message)
        except ChannelClosedError as error:
            raise RankLostError("another rank is gone") from error

    def reports(self) -> list[RankReport]:
        return [_expected(channel, RankReport) for channel in self._channels]

    def wait(self) -> list[RankReady]:
        """Wait until each rank has completed the last part of the start.

        Raises:
            ConfigError: a rank failed because of the settings or the checkpoint.
            RuntimeError: a rank failed for another reason.
            RankLostError: a process is gone.
        """
        answers: list[RankReady] = []
        for channel in self._channels:
            answer = _received(channel)
            if isinstance(answer, EngineFailed):
                raise (ConfigError if answer.is_user_error else RuntimeError)(answer.error)
            answers.append(answer)
        return answers

    def end_process_when_one_is_lost(self) -> None:
        """End this process if another rank is lost, unless it ends the ranks itself before."""
        end = self._end

        def leave() -> None:
            time.sleep(_GRACE_S)
            if end.alive:
                logger.error("another rank is gone: this process ends with it")
                os._exit(1)

        on_hang_up(self._sockets, leave)

    def give_up(self) -> None:
        """End the processes."""
        self._end()


def _started(fd: int) -> subprocess.Popen[bytes]:
    with signals.held_back():
        return subprocess.Popen(
            [*_PROGRAM, str(fd)], pass_fds=[fd], env={**SHORT_SPIN, **os.environ}
        )


def _received(channel: Channel) -> Any:
    try:
        [message] = channel.receive(wait_s=None)
    except ChannelClosedError as error:
        raise RankLostError("another rank is gone") from error
    return message


def _expected(channel: Channel, kind: type[RankReport]) -> RankReport:
    message = _received(channel)
    assert isinstance(message, kind), message
    return message


def _end(sockets: list[socket.socket], processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill the processes, which have no state to save; one that cannot be killed is left behind."""
    for sock in sockets:
        sock.close()
    for process in processes:
        process.kill()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_TIMEOUT_S)
