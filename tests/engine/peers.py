"""Engines in this process that move blocks to each other, and the requests that make them do so."""

import secrets
import time
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from legato.core.cache_config import TransferConfig
from legato.core.config import EngineConfig
from legato.core.kv_transfer import FetchBlocks, SendBlocks
from legato.core.outputs import RequestOutput
from legato.core.request import AbortRequest, AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.stats import TransferStats
from legato.core.token_ids import token_array
from legato.engine.build.builder import load_runtime
from legato.engine.build.transfers import cache_layout, cache_memory, make_transfers
from legato.engine.loop.engine_loop import EngineLoop
from legato.kv.manager import KVCacheManager
from legato.scheduler.scheduler import Scheduler
from legato.transfer.block_memory import CacheMemory
from legato.transfer.mover import Mover
from tests.kv.conservation import check_blocks
from tests.transfer.local_mover import LocalMover

LEASE_S = 1.0
PROMPT = [7 * i % 61 for i in range(300)]


def local_mover(_config: TransferConfig, memory: CacheMemory) -> Mover:
    """Make a mover between engines in this process."""
    return LocalMover(f"legato-{secrets.token_hex(8)}", memory)


class Engine(EngineLoop):
    """A tiny model's.

    Args:
        make_mover: makes the connection to other engines; None for engines in this process.
        settings: fields of `EngineConfig`'s parts.

    Attributes:
        port: where others fetch blocks.
        token_bytes: of a token's keys and values.
        kv: the cache.
        outputs: all that came; key request id.
    """

    def __init__(
        self,
        model: Path,
        make_mover: Callable[[TransferConfig, CacheMemory], Mover] = local_mover,
        **settings: Any,
    ) -> None:
        fields = {
            "load_format": "dummy",
            "kv_transfer_port": 0,
            "kv_lease_s": LEASE_S,
            "kv_cache_memory_bytes": 2**22,
            "kernels": "torch",
            "block_size": 16,
            "max_num_batched_tokens": 32,
            **settings,
        }
        config = EngineConfig.of(model=str(model), dtype="float32", **fields)
        runtime = load_runtime(config)
        assert isinstance(runtime.kv, KVCacheManager)
        self.kv = runtime.kv
        scheduler = Scheduler(
            runtime.config.scheduler, max_model_len=runtime.max_model_len, kv=runtime.kv
        )
        self.layout = cache_layout(
            runtime.checkpoint,
            runtime.cache,
            runtime.groups,
            block_size=runtime.kv.block_size,
            kernels=runtime.kernels,
        )
        memory = cache_memory(runtime.blocks, runtime.states)
        transfers = make_transfers(config.transfer, runtime.kv, memory, self.layout, make_mover)
        super().__init__(scheduler, runtime.kv, runtime.executor, transfers=transfers)
        self.port = transfers.port
        self.token_bytes = runtime.cache.token_bytes
        self.outputs: dict[str, list[RequestOutput]] = {}

    def close(self) -> None:
        assert self.transfers is not None
        self.transfers.close()

    def go(self, *events: AddRequest | AbortRequest) -> None:
        """One turn of an engine process."""
        for output in self.step(events):
            self.outputs.setdefault(output.request_id, []).append(output)

    def tokens(self, request_id: str) -> list[int]:
        return [t for output in self.outputs.get(request_id, []) for t in output.new_token_ids]

    def end(self, request_id: str) -> RequestOutput | None:
        outputs = self.outputs.get(request_id, [])
        return outputs[-1] if outputs and outputs[-1].finish_reason is not None else None

    @property
    def is_clean(self) -> bool:
        """Whether nothing is held for another engine."""
        check_blocks(self.kv)
        return self.kv.num_free_blocks == self.kv.num_blocks


def asked(request_id: str, prompt: list[int] = PROMPT, **fields: Any) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=token_array(prompt),
        params=SamplingParams(temperature=0.0, seed=0, max_tokens=fields.pop("max_tokens", 6)),
        **fields,
    )


def sent(request_id: str, prompt: list[int] = PROMPT) -> AddRequest:
    return asked(request_id, prompt, max_tokens=1, kv_transfer=SendBlocks(request_id))


def fetched(
    request_id: str, source: Engine, prompt: list[int] = PROMPT, *, is_early: bool = False
) -> AddRequest:
    return fetched_from(request_id, source.port, prompt, is_early=is_early)


def completions(source: Engine, count: int, *, is_early: bool = False) -> list[AddRequest]:
    """The requests for as many completions of one prompt, which is "a" there."""
    return [
        asked(f"a-{i}", kv_transfer=FetchBlocks("a", "127.0.0.1", source.port, is_early, i, count))
        for i in range(count)
    ]


def fetched_from(
    request_id: str, port: int, prompt: list[int] = PROMPT, *, is_early: bool = False
) -> AddRequest:
    transfer = FetchBlocks(request_id, "127.0.0.1", port, is_early)
    return asked(request_id, prompt, kv_transfer=transfer)


def transferred(engine: Engine) -> TransferStats:
    assert engine.stats.transfer is not None
    return engine.stats.transfer


def run(*engines: Engine, until: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 30.0
    while not until():
        assert time.monotonic() < ends_s, "it does not come to that"
        for engine in engines:
            if engine.has_work:
                engine.go()
        time.sleep(0.0005)


def expected(model: Path, prompt: list[int] = PROMPT, **settings: Any) -> list[int]:
    """The tokens that one engine alone generates."""
    return _expected(model, tuple(prompt), tuple(settings.items()))


@cache
def _expected(
    model: Path, prompt: tuple[int, ...], settings: tuple[tuple[str, Any], ...]
) -> list[int]:
    with closing(Engine(model, **dict(settings))) as engine:
        engine.go(asked("alone", list(prompt)))
        run(engine, until=lambda: engine.end("alone") is not None)
        return engine.tokens("alone")
