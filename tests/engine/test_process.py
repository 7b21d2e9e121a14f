"""The engine process's loop, on an executor that is gone."""

import socket
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from legato.core.config import EngineConfig
from legato.engine.build import builder
from legato.engine.main import FromFrontEnd, _serve
from legato.engine.process.channel import Channel, pack_frame
from legato.engine.process.engine_messages import (
    EngineFailed,
    EngineReady,
    FromEngine,
    StartPartEnded,
    Taken,
)
from tests.engine.fake_engine import INFO
from tests.engine.test_engine_loop import Engine, request


def test_an_engine_that_computes_nothing_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(lambda _: RuntimeError("no device"))
    monkeypatch.setattr(builder, "build_engine", lambda *_, **__: (engine, INFO))
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor() as threads:
        ending = threads.submit(_serve, Channel(theirs, FromFrontEnd))
        channel = Channel(ours, FromEngine)
        ours.sendall(pack_frame(EngineConfig()))
        *parts, ready = channel.receive(wait_s=None)
        while isinstance(ready, StartPartEnded):
            *parts, ready = [*parts, ready, *channel.receive(wait_s=None)]
        assert all(isinstance(part, StartPartEnded) for part in parts)
        assert isinstance(ready, EngineReady)
        assert msgspec.structs.replace(ready.info, start_s={}) == INFO
        assert "imports" in ready.info.start_s
        ours.sendall(pack_frame(request("a", 8)))
        messages = channel.receive(wait_s=None)
        if len(messages) == 1:
            messages += channel.receive(wait_s=None)
        taken, failed = messages
        assert taken == Taken(1)
        assert isinstance(failed, EngineFailed)
        assert "no device" in failed.error
        assert ending.result(10) == 1
