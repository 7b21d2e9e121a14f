"""Settings that are changed while a fleet runs."""

import itertools
import os
import signal
from pathlib import Path

import msgspec
import pytest

from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.errors import ConfigError, InvalidRequestError
from legato.engine.process.channel import pack
from legato_fleet.engine import FleetEngine
from legato_fleet.replica_messages import ChangeSettings, Sent
from tests.fleet.in_process import CONFIG, SHORT, complete, fleet, joined

_CHUNK = 32
_NEW = itertools.count(2)
"""Tokens of prompts without anything cached."""
_CHANGED = msgspec.structs.replace(CONFIG.scheduler, max_num_batched_tokens=_CHUNK, ttft_slo_s=9.0)


async def longest_chunks(engine: FleetEngine) -> dict[str, int]:
    """Of prompts longer than the chunks; key replica id."""
    engine.activity.recent.clear()
    longest: dict[str, int] = {}
    while longest.keys() != engine.replicas.keys():
        await complete(engine, [next(_NEW)] * 100, SHORT)
        for step in engine.activity.recent.steps:
            longest[step.replica_id] = max(longest.get(step.replica_id, 0), step.num_prefill_tokens)
    return longest


async def test_all_replicas_go_by_them_and_those_that_come(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, "round-robin") as (engine, replicas):
        assert set((await longest_chunks(engine)).values()) == {100}
        engine.reconfigure(_CHANGED)
        await complete(engine, [1], SHORT)
        await complete(engine, [1], SHORT)  # behind them at either
        assert set((await longest_chunks(engine)).values()) == {_CHUNK}
        assert engine.settings.asked is _CHANGED
        pid = replicas.by_id["r0"]._supervisor.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await joined(engine, 1)
        await replicas.add("late")
        await joined(engine, 3)
        assert await longest_chunks(engine) == {"r0": _CHUNK, "r1": _CHUNK, "late": _CHUNK}


async def test_what_cannot_be_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as (engine, replicas):
        whole = msgspec.structs.replace(CONFIG.scheduler, max_num_batched_tokens=10**6)
        with pytest.raises(ConfigError, match="on a running server"):
            engine.reconfigure(whole)
        assert engine.settings.asked is CONFIG.scheduler
        [replica] = replicas.by_id.values()
        [door_id] = replica._doors
        other = msgspec.structs.replace(CONFIG.scheduler, max_num_seqs=9)
        for scheduler in (whole, other):
            frame = pack(Sent(events=[ChangeSettings(scheduler)], sent_s=0.0))
            with pytest.raises(InvalidRequestError):
                replica.take(door_id, frame)
        assert replica._supervisor.config.scheduler == CONFIG.scheduler


async def test_one_of_several_front_doors_changes_none(tmp_path: Path) -> None:
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=8))
    async with fleet(tmp_path, 1, config=config, is_only_door=False) as (engine, _):
        with pytest.raises(ConfigError, match="deploy them again"):
            engine.reconfigure(_CHANGED)
