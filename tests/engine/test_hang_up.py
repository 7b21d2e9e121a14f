"""A thread that sees the other end of a socket go."""

import socket
import threading

from legato.engine.ranks.hang_up import on_hang_up

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
