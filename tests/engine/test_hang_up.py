"""Ranks that cannot be notified of a loss where they wait: a thread sees a socket's end close."""

import os
import socket
import threading
from typing import Any

import pytest

from legato.core.config import EngineConfig
from legato.engine.build.ranks import processes
from legato.engine.build.ranks.processes import RankProcesses
from legato.engine.process.channel import on_hang_up

_PATIENCE_S = 30.0


def test_the_first_end_to_go_is_told_once() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    told, calls = threading.Event(), list[int]()

    def act() -> None:
        calls.append(1)
        told.set()

    on_hang_up([ours for ours, _ in pairs], act)
    pairs[0][1].sendall(b"no end")
    assert not told.wait(0.05)
    for ours, theirs in pairs[1:]:
        ours.close()  # which changes nothing
        theirs.close()
    assert told.wait(_PATIENCE_S)
    pairs[0][0].close()
    pairs[0][1].close()
    assert calls == [1]


class NoProcess:
    """What stands for a `Popen`."""

    def kill(self) -> None: ...

    def wait(self, timeout_s: float) -> None: ...


@pytest.mark.parametrize("is_given_up", [False, True])
def test_rank_0_ends_with_a_rank_that_it_has_not_given_up(
    is_given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs: list[socket.socket] = []
    ended, waited = list[int](), threading.Event()

    def started(fd: int) -> Any:
        theirs.append(socket.socket(fileno=os.dup(fd)))
        return NoProcess()

    monkeypatch.setattr(processes, "_started", started)
    monkeypatch.setattr(processes.os, "_exit", ended.append)
    monkeypatch.setattr(processes.time, "sleep", lambda _: waited.set())
    others = RankProcesses(EngineConfig.of(model="it", tensor_parallel_size=3))
    others.end_process_when_one_is_lost()
    if is_given_up:
        others.give_up()
    theirs[1].close()
    assert waited.wait(_PATIENCE_S)
    for thread in threading.enumerate():
        if thread.name == "hang-up":
            thread.join(_PATIENCE_S)
    assert ended == ([] if is_given_up else [1])
    theirs[0].close()
    others.give_up()
