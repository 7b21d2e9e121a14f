"""The other engine of a transfer, in a process to be killed: `python -m tests.engine.killed_peer`.

With `prefill MODEL`, it computes a prompt. With `decode MODEL PORT`, it fetches one once it is told
to, and is killed as soon as that is being read. Either says its own port when it is ready.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from legato.engine.build.transfers import nixl_mover
from legato.transfer.block_memory import Spans
from legato.transfer.mover import Mover, Read
from tests.engine.peers import Engine, fetched_from, sent

WIDE = {
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 256,
}
"""A tiny model whose cache is not: a prompt takes long enough to be read that it can be cut off."""
CACHE_BYTES = 3 * 2**26


class Struck:
    """A mover that has something done as soon as its first read is on its way.

    Attributes:
        states: of the read, when that had been done.
    """

    def __init__(self, mover: Mover, strike: Callable[[], object]) -> None:
        self.states: list[str] = []
        self._mover = mover
        self._strike = strike

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def read(self, peer: str, spans: Spans, gpu: int | None) -> Read:
        read = self._mover.read(peer, spans, gpu)
        if not self.states:
            self._strike()
            self.states.append(read.state())
        return read


def prefill(model: Path) -> None:
    engine = Engine(model, nixl_mover, kv_cache_memory_bytes=CACHE_BYTES, kv_lease_s=60.0)
    engine.go(sent("a"))
    while engine.end("a") is None:
        engine.go()
    print("port", engine.port, flush=True)
    signal.pause()


def decode(model: Path, port: int) -> None:
    engine = Engine(
        model,
        lambda config, memory: Struck(nixl_mover(config, memory), _die),
        kv_cache_memory_bytes=CACHE_BYTES,
    )
    print("port", engine.port, flush=True)
    sys.stdin.readline()
    engine.go(fetched_from("a", port))
    while engine.end("a") is None:
        engine.go()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    role, path, *rest = sys.argv[1:]
    if role == "prefill":
        prefill(Path(path))
    else:
        decode(Path(path), int(rest[0]))
