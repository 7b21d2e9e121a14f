"""What a fleet does with more than it can take, and for whom."""

import asyncio
from pathlib import Path

import pytest

from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.outputs import RefusalReason
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.engine.errors import OverloadedError
from legato.language.completion import Completion
from legato_fleet.autoscaling import strain, wanted_replicas
from legato_fleet.engine import FleetEngine
from tests.fleet.in_process import (
    CONFIG,
    EVERYONES,
    LONG,
    SHORT,
    InProcessReplicas,
    begun,
    complete,
    fleet,
    joined,
)

_SOME = SamplingParams(max_tokens=100)


async def waits_at(engine: FleetEngine, replica_id: str, num: int) -> None:
    while engine.replicas[replica_id].num_waiting != num:
        await asyncio.sleep(0.01)


async def test_what_one_replica_refuses_another_is_asked_for(tmp_path: Path) -> None:
    """Round robin sends streams to one replica and short answers to the other."""
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1, max_waiting=1))
    async with (
        fleet(tmp_path, 2, "round-robin", config=config) as (engine, _),
        begun(engine, [1, 2, 3]),
    ):
        await complete(engine, [1], SHORT)
        waiting = [asyncio.create_task(complete(engine, [2], LONG))]
        await waits_at(engine, "r0", 1)
        await complete(engine, [1], SHORT)
        assert len((await complete(engine, [3], SHORT)).token_ids) == 5  # r0 is full
        async with begun(engine, [4]):
            waiting += [asyncio.create_task(complete(engine, [i], LONG)) for i in (5, 6)]
            [refused], _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(OverloadedError) as caught:
                await refused
            assert caught.value.reason is RefusalReason.QUEUE_FULL
            assert caught.value.retry_after_s > 0
            while not any(tenant.num_refused for tenant in engine.stats.tenants):
                await asyncio.sleep(0.01)
            [tenant] = engine.stats.tenants
            assert tenant.num_refused == 1, "what was tried elsewhere counts as refused"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("routing", ["kept-promise", "round-robin"])
async def test_a_flood_of_one_tenants_leaves_others_their_turn_at_every_replica(
    tmp_path: Path, routing: str
) -> None:
    async with fleet(tmp_path, 2, routing) as (engine, _):
        ends: list[str] = []

        async def one(tenant: str, token_id: int) -> None:
            params = SamplingParams(max_tokens=20)
            await complete(engine, [token_id] * 50, params, ServiceParams(tenant=tenant))
            ends.append(tenant)

        flood = [asyncio.create_task(one("many", i)) for i in range(60)]
        while sum(replica.num_waiting for replica in engine.replicas.values()) < 40:
            await asyncio.sleep(0.01)
        others = [asyncio.create_task(one("few", 100 + i)) for i in range(4)]
        await asyncio.gather(*flood, *others)
        num_before = len(ends) - ends[::-1].index("few")
        assert num_before <= 40, "those who asked for little waited for all of the flood"
        told = {tenant.name: tenant.service_s for tenant in engine.stats.tenants}
        assert 0 < told["few"] < told["many"]


async def scaled(engine: FleetEngine, replicas: InProcessReplicas, most: int) -> int:
    """As Ray Serve asks for it: how many replicas there are to be now."""
    there = list(replicas.by_id.values())
    strains = [strain(one.state, one.classes.values()) for one in there if one.state is not None]
    wanted = min(most, wanted_replicas(strains))
    while len(replicas.by_id) < wanted:
        await replicas.add(f"more{len(replicas.by_id)}")
    while len(replicas.by_id) > wanted:
        await replicas.end(max(replicas.by_id))
    await joined(engine, wanted)
    return wanted


async def test_replicas_come_under_strain_and_go_after_it_and_no_stream_is_lost(
    tmp_path: Path,
) -> None:
    scheduler = SchedulerConfig(max_num_seqs=4, itl_slo_s=0.5, ttft_slo_s=0.2)
    async with fleet(tmp_path, 1, config=EngineConfig(scheduler=scheduler)) as (engine, replicas):
        streams: list[asyncio.Task[Completion]] = []
        for wanted, num_at_once in ((3, 60), (1, 0)):
            num = 1
            while num != wanted:
                new = num_at_once - sum(not one.done() for one in streams)
                streams += [
                    asyncio.create_task(complete(engine, [i] * 50, _SOME))
                    for i in range(1, 1 + new)
                ]
                await asyncio.sleep(0.2)
                num = await scaled(engine, replicas, most=3)
        done = await asyncio.gather(*streams)
        assert [len(one.token_ids) for one in done] == [100] * len(streams)
        assert not engine.num_restarts


async def test_all_replicas_are_replaced_one_by_one_under_load(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, config=CONFIG) as (engine, replicas):
        is_over = asyncio.Event()
        ends: list[int] = []

        async def keep_asking(token_id: int) -> None:
            while not is_over.is_set():
                one = await complete(engine, [token_id] * 30, _SOME, EVERYONES)
                ends.append(len(one.token_ids))

        asking = [asyncio.create_task(keep_asking(i)) for i in range(1, 7)]
        for i in range(2):
            await replicas.add(f"new{i}")
            await joined(engine, 3)
            await replicas.end(f"r{i}")
            await joined(engine, 2)
        num_before = len(ends)
        while len(ends) < num_before + 6:
            await asyncio.sleep(0.05)
        is_over.set()
        await asyncio.gather(*asking)
        assert set(ends) == {100}
        assert sorted(engine.replicas) == ["new0", "new1"]
        assert not engine.num_restarts
