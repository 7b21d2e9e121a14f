"""Ranks as processes: that they die with one another, and what is seen of it."""

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from legato import AsyncEngineArgs, AsyncLLM, SamplingParams
from legato.engine.process import supervisor
from tests.families.tiny import MODELS, random_model
from tests.forks.process import runs

pytestmark = pytest.mark.usefixtures("forked_engines")

_PATIENCE_S = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT: Any = {"prompt_token_ids": list(range(3, 40))}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Of a model with recurrent layers, whose states are lost with a rank."""
    random_model(MODELS["granite-4-h"]).save_pretrained(tmp_path)
    return {
        "model": str(tmp_path),
        "dtype": "float32",
        "kv_cache_memory_bytes": 2**22,
        "tensor_parallel_size": 2,
    }


def processes(module: str) -> list[psutil.Process]:
    """Child processes, and their children, that run the module."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if runs(child, module)]


def rank() -> psutil.Process:
    [process] = processes("legato.engine.build.ranks.main")
    return process


async def tokens(llm: AsyncLLM) -> list[int]:
    [*_, whole] = [generation async for generation in llm.generate(PROMPT, GREEDY)]
    return list(whole.outputs[0].token_ids)


async def test_ranks_die_with_one_another_and_come_back(settings: dict[str, Any]) -> None:
    config = AsyncEngineArgs(**settings)
    others = processes("legato.engine.main")  # of servers that tests share
    async with AsyncLLM.from_engine_args(config, skip_tokenizer_init=True) as llm:
        undisturbed = await tokens(llm)
        [engine] = set(processes("legato.engine.main")).difference(others)
        first = rank()
        for process in (engine, first):
            sockets = process.net_connections(kind="inet")
            assert all(sock.laddr.ip == "127.0.0.1" for sock in sockets)
        first.kill()
        assert await tokens(llm) == undisturbed
        assert not engine.is_running()
        [engine] = set(processes("legato.engine.main")).difference(others)
        second = rank()
        engine.kill()
        await asyncio.to_thread(second.wait, _PATIENCE_S)
    assert not processes("legato.engine.build.ranks.main")


async def test_a_rank_that_takes_no_part_is_replaced_with_the_engine(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for it without computing, so the engine counts as stuck."""
    monkeypatch.setattr(supervisor, "TICK_S", 0.2)
    config = AsyncEngineArgs(**settings)
    async with AsyncLLM.from_engine_args(config, skip_tokenizer_init=True) as llm:
        undisturbed = await tokens(llm)
        stopped = rank()
        stopped.suspend()
        assert await tokens(llm) == undisturbed
        # Its parent, the engine, has ended, too: the system may not have reaped it yet.
        assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
    assert not processes("legato.engine.build.ranks.main")
