"""Prompts are computed by some replicas and continued by others: transfers are the real ones, over
TCP between processes, of blocks with nothing in them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from legato.core.cache_config import TransferConfig
from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.kv_transfer import FetchBlocks
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.pooling import UNSAMPLED
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import EngineRecord, StepBegun
from legato.core.token_ids import token_array
from legato.engine.client.kv_tickets import KVTransferParams, signature
from legato.engine.errors import EngineDeadError, OverloadedError
from legato.engine.process.channel import pack, unpacker
from legato.language.completion import CompletionDelta
from legato.observe.traces.request_story import read_stories
from legato.observe.traces.tracer import Tracer
from legato_fleet.engine import FleetEngine
from legato_fleet.records import _TIMES
from legato_fleet.replica import Replica
from legato_fleet.replica_messages import Brought, FromReplica, Joined, Sent, Ticketed
from tests.engine.submitting import submitted
from tests.fleet.in_process import (
    LONG,
    SHORT,
    InProcessReplicas,
    begun,
    complete,
    ends_because,
    joined,
    no_text,
    write_profile,
)

KEY = "sixteen bytes, or more of them"
PROMPT = [7 * i % 61 for i in range(600)]
NUM_HANDED = 576
LEASE_S = 3.0


def config(folder: Path, **scheduler: Any) -> EngineConfig:
    key = folder / "key"
    key.write_text(KEY)
    return EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=8, ttft_slo_s=60.0, **scheduler),
        transfer=TransferConfig(kv_lease_s=LEASE_S, kv_transfer_key_file=str(key)),
    )


@asynccontextmanager
async def pools(
    folder: Path, *replica_ids: str, **scheduler: Any
) -> AsyncIterator[tuple[FleetEngine, InProcessReplicas]]:
    """Replicas whose names begin with "p" prefill, the others decode."""
    asked = config(folder, **scheduler)
    replicas = InProcessReplicas(asked, write_profile(folder))
    await asyncio.gather(*(add(replicas, replica_id) for replica_id in replica_ids))
    engine = await FleetEngine.start(
        asked, [replicas], no_text(), routing="kept-promise", is_only_door=True
    )
    try:
        await joined(engine, len(replica_ids))
        yield engine, replicas
    finally:
        await engine.close()


async def add(replicas: InProcessReplicas, replica_id: str) -> None:
    await replicas.add(replica_id, "prefill" if replica_id.startswith("p") else "decode")


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not is_so():
            await asyncio.sleep(0.01)


async def is_clean(engine: FleetEngine, replicas: InProcessReplicas) -> None:
    """Nothing is held for another replica, once leases have ended."""
    assert not len(engine._dispatcher.placed)
    assert not any(view.num_in_flight for view in engine._router.replicas.values())
    for replica in replicas.by_id.values():
        assert not replica._owners
        async with asyncio.timeout(60.0):
            while (state := await replica._supervisor.state()).num_free_blocks < state.num_blocks:
                await asyncio.sleep(0.05)


def engine_pid(replica: Replica) -> int:
    pid = replica._supervisor.engine_pid
    assert pid is not None
    return pid


def prompts(num: int) -> list[list[int]]:
    """That have nothing in common."""
    return [[i, *PROMPT] for i in range(num)]


async def test_prompts_come_from_one_pool_to_the_other(tmp_path: Path) -> None:
    async with pools(tmp_path, "p0", "p1", "d0", "d1", "d2") as (engine, replicas):
        done = await asyncio.gather(*(complete(engine, one, SHORT) for one in prompts(6)))
        assert [len(one.token_ids) for one in done] == [5] * 6
        assert [one.num_cached_tokens for one in done] == [NUM_HANDED] * 6
        queries = {name: r._stats.num_prefix_cache_queries for name, r in replicas.by_id.items()}
        assert min(queries.values()) > 0, queries
        # Scored prompts, and prompts of less than a block, stay with one replica.
        scored = msgspec.structs.replace(SHORT, prompt_logprobs=0)
        assert (await complete(engine, [9, *PROMPT], scored)).num_cached_tokens == 0
        assert (await complete(engine, [1, 2, 3], SHORT)).num_cached_tokens == 0
        # What goes on is where it was: its prefill has not what was generated.
        before = [replicas.by_id[name]._stats.num_prefix_cache_queries for name in ("p0", "p1")]
        again = await complete(engine, prompts(1)[0], SHORT)
        assert again.num_cached_tokens == NUM_HANDED
        after = [replicas.by_id[name]._stats.num_prefix_cache_queries for name in ("p0", "p1")]
        assert before == after
        await is_clean(engine, replicas)


async def test_a_pooled_prompt_is_one_replicas(tmp_path: Path) -> None:
    deltas: list[CompletionDelta] = []
    async with pools(tmp_path, "p0", "d0") as (engine, replicas):
        async with submitted(
            engine, [PROMPT], UNSAMPLED, lambda _, delta: deltas.append(delta), pooling="last"
        ) as submission:
            await submission.ended.wait()
            submission.check()
        [delta] = deltas
        assert (delta.finish_reason, delta.token_ids) == (FinishReason.STOP, ())
        queries = {name: r._stats.num_prefix_cache_queries for name, r in replicas.by_id.items()}
        assert queries == {"p0": 0, "d0": len(PROMPT)}
        await is_clean(engine, replicas)


async def test_a_trace_tells_of_both_halves(tmp_path: Path) -> None:
    async with pools(tmp_path, "p0", "d0") as (engine, _):
        tracer = Tracer(engine.activity.records, tmp_path / "trace.jsonl", {}, 2**20)
        await complete(engine, PROMPT, SHORT)
        await tracer.stop()
    stories = {story.request_id: story for story in read_stories(tmp_path / "trace.jsonl")}
    [request_id] = [name for name in stories if f"{name}.prefill" in stories]
    whole, prompt = stories[request_id], stories[f"{request_id}.prefill"]
    assert (whole.replica_ids, prompt.replica_ids) == (["d0"], ["p0"])
    assert whole.fetched is not None
    assert whole.fetched.num_tokens == NUM_HANDED
    assert whole.ended is not None
    assert whole.ended.num_output_tokens == 5
    assert sum(chunk.num_tokens for _, chunk in prompt.own_chunks()) == len(PROMPT)


def test_all_records_come_on_our_clock() -> None:
    records = (*get_args(EngineRecord), StepBegun)
    assert {record.__name__ for record in records} == set(_TIMES)


async def test_a_prefill_that_dies_costs_a_computation_elsewhere(tmp_path: Path) -> None:
    async with pools(tmp_path, "p0", "d0", "d1") as (engine, replicas):
        prefill = replicas.by_id["p0"]
        async with begun(engine, [1, 2, 3]) as stream:
            os.kill(engine_pid(prefill), signal.SIGSTOP)
            waiting = [asyncio.create_task(complete(engine, one, SHORT)) for one in prompts(4)]
            await until(lambda: len(engine._dispatcher.placed) == 5)
            await asyncio.sleep(0.1)
            os.kill(engine_pid(prefill), signal.SIGKILL)
            done = await asyncio.gather(*waiting)
            assert [one.num_cached_tokens for one in done] == [0] * 4
            assert engine.num_restarts == 1
            assert not stream.ended.is_set()
        # Another engine of the replica listens elsewhere.
        await joined(engine, 3)
        assert (await complete(engine, [8, *PROMPT], SHORT)).num_cached_tokens == NUM_HANDED
        await is_clean(engine, replicas)
        # Without any, replicas that decode compute prompts, too; and the other way round.
        await replicas.kill("p0")
        await joined(engine, 2)
        assert (await complete(engine, [9, *PROMPT], SHORT)).num_cached_tokens == 0
        await add(replicas, "p1")
        await joined(engine, 3)
        for gone in ("d0", "d1"):
            await replicas.kill(gone)
        await joined(engine, 1)
        assert len((await complete(engine, [7, *PROMPT], SHORT)).token_ids) == 5
        await is_clean(engine, replicas)


async def test_a_decode_that_dies_costs_what_has_begun_there_and_nothing_else(
    tmp_path: Path,
) -> None:
    async with pools(tmp_path, "p0", "d0", "d1") as (engine, replicas):
        async with begun(engine, PROMPT[:400]) as stream:
            [placed] = engine._dispatcher.placed
            decode = replicas.by_id[placed.link.replica_id]
            os.kill(engine_pid(decode), signal.SIGSTOP)
            waiting = [asyncio.create_task(complete(engine, one, SHORT)) for one in prompts(6)]
            await until(lambda: sum(half.link is placed.link for half in running(engine)) > 1)
            os.kill(engine_pid(decode), signal.SIGKILL)
            await ends_because(stream, "died while it held")
        done = await asyncio.gather(*waiting)
        assert all(one.finish_reason is FinishReason.LENGTH for one in done)
        await joined(engine, 3)
        await is_clean(engine, replicas)


def running(engine: FleetEngine) -> list[Any]:
    return [placed.decode for placed in engine._dispatcher.placed]


async def test_a_prefill_that_is_to_end_is_read_to_the_end(tmp_path: Path) -> None:
    async with pools(tmp_path, "p0", "p1", "d0") as (engine, replicas):
        decode = replicas.by_id["d0"]
        os.kill(engine_pid(decode), signal.SIGSTOP)
        waiting = [asyncio.create_task(complete(engine, one, SHORT)) for one in prompts(2)]
        await until(lambda: len(engine._dispatcher.placed) == 2)
        leaving = {
            placed.prefill.link.replica_id for placed in engine._dispatcher.placed if placed.prefill
        }
        assert leaving == {"p0", "p1"}
        ending = asyncio.create_task(replicas.end("p0"))
        await asyncio.sleep(0.3)  # the prompts are computed by now, and not fetched
        assert not ending.done()
        os.kill(engine_pid(decode), signal.SIGCONT)
        done = await asyncio.gather(*waiting)
        assert [one.num_cached_tokens for one in done] == [NUM_HANDED] * 2
        await ending
        assert engine.num_restarts == 0
        # Who leaves takes both halves along.
        async with submitted(engine, [[5, *PROMPT[:400]]], LONG):
            assert len(list(engine._dispatcher.placed)) == 1
        await complete(engine, [1], SHORT)
        await is_clean(engine, replicas)


async def test_what_the_prefill_refuses_is_refused(tmp_path: Path) -> None:
    async with pools(tmp_path, "p0", "d0", max_waiting=1, max_num_batched_tokens=64) as (
        engine,
        replicas,
    ):
        ends = await asyncio.gather(
            *(complete(engine, one, SHORT) for one in prompts(16)), return_exceptions=True
        )
        refused = [one for one in ends if isinstance(one, OverloadedError)]
        assert 0 < len(refused) < 16
        assert not [one for one in ends if isinstance(one, EngineDeadError)]
        await is_clean(engine, replicas)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_replica_believes_no_ticket_unchecked(tmp_path: Path, role: Any) -> None:
    replicas = InProcessReplicas(config(tmp_path), write_profile(tmp_path))
    replica = await replicas.add("r", role)
    frames = replica.attach("door")
    decode = unpacker(FromReplica).decode
    joined_to = decode(await anext(frames))
    assert isinstance(joined_to, Joined)
    assert (joined_to.role, joined_to.info.transfer is None) == (role, False)
    request = AddRequest(
        request_id="a",
        prompt_token_ids=token_array(PROMPT),
        params=SamplingParams(max_tokens=1, seed=0),
        eos_token_ids=(1,),
    )
    fetch = KVTransferParams(
        do_remote_prefill=True, remote_host="192.0.2.1", remote_port=1, transfer_id="t"
    )
    forged = msgspec.structs.replace(fetch, signature=signature(b"another key", "x", 1, "t"))
    send = KVTransferParams(do_remote_decode=True)
    bad = {
        "prefill": {"not started with --kv-role decode": fetch},
        "decode": {"not started with --kv-role prefill": send, "signature": forged},
    }[role]

    async def answer(events: list[Any]) -> RequestOutput:
        replica.take("door", pack(Sent(events=events, sent_s=0.0)))
        while True:
            told = decode(await anext(frames))
            if isinstance(told, Brought) and told.outputs:
                return told.outputs[0]

    try:
        for message, ticket in bad.items():
            events: list[Any] = [Ticketed(request=request, ticket=ticket)]
            output = await answer(events)
            assert output.finish_reason is FinishReason.ERROR
            assert message in (output.error or "")
        # Without a ticket, it has nothing to do with others.
        told = FetchBlocks("t", "192.0.2.1", 1)
        plain = msgspec.structs.replace(request, kv_transfer=told)
        assert len((await answer([plain])).new_token_ids) == 1
    finally:
        await frames.aclose()
        await replica.close()
