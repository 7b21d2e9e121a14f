"""The engine process's loop, on an executor that is gone."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from legato.core.config import EngineConfig
from legato.core.stats import CacheInfo
from legato.engine.process.channel import Channel, pack_frame
from legato.engine.process.main import FromFrontEnd, _serve
from legato.engine.process.messages import (
    EngineFailed,
    EngineInfo,
    EngineReady,
    FromEngine,
)
from legato.engine.startup import build
from tests.engine.test_engine_loop import Engine, request

INFO = EngineInfo(
    model="m",
    served_model_name="m",
    max_model_len=400,
    vocab_size=32_000,
    eos_token_ids=(),
    cache=CacheInfo(num_blocks=1, block_size=32, enable_prefix_caching=True),
    slo_classes={},
    default_sampling={},
    settings={},
)


def test_an_engine_that_computes_nothing_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(lambda _: RuntimeError("no device"))
    monkeypatch.setattr(build, "build_engine", lambda _: (engine, INFO, None))
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor() as threads:
        ending = threads.submit(_serve, Channel(theirs, FromFrontEnd))
        channel = Channel(ours, FromEngine)
        ours.sendall(pack_frame(EngineConfig()))
        assert channel.receive(block=True) == [EngineReady(INFO)]
        ours.sendall(pack_frame(request("a", 8)))
        [failed] = channel.receive(block=True)
        assert isinstance(failed, EngineFailed)
        assert "no device" in failed.error
        assert ending.result(10) == 1
