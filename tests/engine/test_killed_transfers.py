"""One of two engines is killed while the other reads its memory, or has its own read."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from transformers import LlamaConfig

from legato.core.cache_config import TransferConfig
from legato.engine.build.transfers import nixl_mover
from legato.transfer.block_memory import CacheMemory
from legato.transfer.mover import Mover
from legato.transfer.nixl_mover import nixl_package
from tests.checkpoint.test_dummy import described
from tests.engine.killed_peer import CACHE_BYTES, WIDE, Struck
from tests.engine.peers import (
    Engine,
    asked,
    expected,
    fetched_from,
    run,
    sent,
    transferred,
)
from tests.model.conftest import TINY

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(nixl_package() is None, reason="needs NIXL: legato-llm[disaggregated]"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**TINY | {"max_position_embeddings": 512} | WIDE)
    return described(tmp_path_factory.mktemp("model"), config, dtype="float32")


@pytest.fixture(autouse=True)
def over_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a machine, memory is read at a stroke that nothing can cut off."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@contextmanager
def peer(*arguments: str) -> Iterator["tuple[subprocess.Popen[str], int]"]:
    """The other engine, which is ready, and its port."""
    command = [sys.executable, "-m", "tests.engine.killed_peer", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdout is not None
        words = (line.split() for line in process.stdout)  # NIXL says more there
        yield process, next(int(said[1]) for said in words if said[0] == "port")
    finally:
        process.kill()
        process.wait()


def test_a_prefill_killed_while_it_is_read_costs_a_computation(model: Path) -> None:
    struck: list[Struck] = []

    def make_mover(config: TransferConfig, memory: CacheMemory) -> Mover:
        struck.append(Struck(nixl_mover(config, memory), kill))
        return struck[0]

    def kill() -> None:
        prefill.kill()
        prefill.wait()

    with (
        peer("prefill", str(model)) as (prefill, port),
        closing(Engine(model, make_mover, kv_cache_memory_bytes=CACHE_BYTES)) as decode,
    ):
        decode.go(fetched_from("a", port))
        run(decode, until=lambda: decode.end("a") is not None)
        assert struck[0].states[0] != "done", "it was over before"
        assert decode.tokens("a") == expected(model, kv_cache_memory_bytes=CACHE_BYTES)
        assert transferred(decode).num_recomputed == 1
        assert decode.is_clean


def test_a_decode_killed_while_it_reads_leaves_nothing_behind(model: Path) -> None:
    with (
        closing(Engine(model, nixl_mover, kv_cache_memory_bytes=CACHE_BYTES)) as prefill,
        peer("decode", str(model), str(prefill.port)) as (decode, _),
    ):
        prefill.go(sent("a"))
        run(prefill, until=lambda: prefill.end("a") is not None)
        assert decode.stdin is not None
        decode.stdin.write("go\n")
        assert decode.wait(timeout=60) == -signal.SIGKILL
        run(prefill, until=lambda: prefill.is_clean)
        assert transferred(prefill).num_expired == 1
        prefill.go(asked("b"))
        run(prefill, until=lambda: prefill.end("b") is not None)
        assert prefill.tokens("b") == expected(model, kv_cache_memory_bytes=CACHE_BYTES)
