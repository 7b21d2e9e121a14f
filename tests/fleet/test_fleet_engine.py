"""One front door and several replicas, whose engines are real processes that only last."""

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from benchmarks.routing.kill import LEFT

from legato.core.errors import InvalidRequestError
from legato.core.outputs import FinishReason
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.structured_outputs import StructuredOutputs
from legato.core.token_ids import token_array
from legato.engine.errors import EngineDeadError
from legato.engine.process.channel import pack, unpacker
from legato.engine.process.pulse import Pulse
from legato_fleet import link as link_module
from legato_fleet import replica as replica_module
from legato_fleet.replica import Replica
from legato_fleet.replica_messages import Brought, FromReplica, Joined, Sent
from tests.fleet.in_process import (
    CONFIG,
    LONG,
    SHORT,
    InProcessReplicas,
    begun,
    complete,
    ends_because,
    fleet,
    home,
    joined,
    write_profile,
)


async def test_requests_are_shared_and_sessions_stay_where_they_are_cached(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2) as (engine, replicas):
        prompts = [[i] * 600 for i in range(1, 9)]
        first = await asyncio.gather(*(complete(engine, prompt, SHORT) for prompt in prompts))
        assert all(len(one.token_ids) == 5 for one in first)
        assert not engine._dispatcher.placed
        assert not engine.num_unfinished
        queries = [replica._stats.num_prefix_cache_queries for replica in replicas.by_id.values()]
        assert min(queries) > 0, "one replica alone had all of them"
        for prompt in prompts:
            await complete(engine, [*prompt, 1], SHORT)
        # One or two may find their replica held up by a busy machine, and go to the other.
        assert engine.stats.num_prefix_cache_hits >= 0.7 * 600 * len(prompts)


async def test_a_tenant_goes_where_its_own_prompts_are_cached(tmp_path: Path) -> None:
    """The router's hashes have the tenant, as the cache has: another's prompts are no hits."""
    async with fleet(tmp_path, 2) as (engine, _):
        prompts = [[i] * 600 for i in range(1, 9)]
        owners = {name: ServiceParams().of_key(name, name) for name in ("lab", "ops")}
        for prompt in prompts:
            await complete(engine, prompt, SHORT, owners["lab"])
        assert engine.stats.num_prefix_cache_hits == 0
        for prompt in prompts:
            await complete(engine, [*prompt, 1], SHORT, owners["ops"])
        assert engine.stats.num_prefix_cache_hits == 0
        for owner in owners.values():
            num_hits = engine.stats.num_prefix_cache_hits
            for prompt in prompts:
                await complete(engine, [*prompt, 2], SHORT, owner)
            found = engine.stats.num_prefix_cache_hits - num_hits
            assert found >= 0.7 * 600 * len(prompts)


async def test_a_killed_engine_ends_what_has_begun_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(tmp_path, 2, "round-robin") as (engine, replicas):
        async with begun(engine, [1, 2, 3]) as stream:
            replica = replicas.by_id[home(engine)]
            pid = replica._supervisor.engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            # Two of these go where nothing is done any more.
            waiting = [asyncio.create_task(complete(engine, [i] * 9, SHORT)) for i in range(4)]
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            await ends_because(stream, "died while it held")
        done = await asyncio.gather(*waiting)
        assert all(one.finish_reason is FinishReason.LENGTH for one in done)
        assert engine.num_restarts == 1
        assert not engine._dispatcher.placed
        assert not replica._owners
        assert LEFT.findall(caplog.text) == [("2", "1")], "the front door tells what became of all"


async def test_a_replica_that_hangs_gets_nothing_and_what_waits_there_is_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor does not notice, as where the whole replica hangs."""
    monkeypatch.setattr(Pulse, "is_stuck", False)
    async with fleet(tmp_path, 2, "round-robin") as (engine, replicas):
        async with begun(engine, [1, 2, 3]) as stream:
            hung = home(engine)
            replica = replicas.by_id[hung]
            pid = replica._supervisor.engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            try:
                waiting = [asyncio.create_task(complete(engine, [i] * 9, SHORT)) for i in range(4)]
                view = engine._router.replicas[hung]
                while not view.is_doubtful(time.monotonic()):
                    await asyncio.sleep(0.1)
                num_there = view.num_in_flight
                await asyncio.gather(*(complete(engine, [9] * i, SHORT) for i in range(1, 9)))
                assert view.num_in_flight <= num_there
                done = await asyncio.gather(*waiting)
                assert all(one.finish_reason is FinishReason.LENGTH for one in done)
                assert view.num_in_flight == 1, "the stream that had begun"
            finally:
                os.kill(pid, signal.SIGCONT)
            while view.is_doubtful(time.monotonic()):
                await asyncio.sleep(0.1)
            await asyncio.gather(*(complete(engine, [7] * i, SHORT) for i in range(1, 5)))
            del stream
        assert engine.num_restarts == 0


async def test_a_replica_that_is_gone_is_not_sent_anything(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2) as (engine, replicas):
        async with begun(engine, [1, 2, 3]) as stream:
            gone = home(engine)
            await replicas.kill(gone)
            await ends_because(stream, "ended while it held")
        await joined(engine, 1)
        await asyncio.gather(*(complete(engine, [i] * 9, SHORT) for i in range(4)))
        await replicas.kill(next(iter(replicas.by_id)))
        await joined(engine, 0)
        with pytest.raises(EngineDeadError, match="no replica"):
            await complete(engine, [1], SHORT)
        await replicas.add("late")
        await joined(engine, 1)
        await complete(engine, [1], SHORT)


async def test_a_replica_that_is_to_end_ends_what_it_has(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2) as (engine, replicas):
        async with begun(engine, [1, 2, 3]) as stream:
            leaving = home(engine)
            ending = asyncio.create_task(replicas.end(leaving))
            await replicas.lines[leaving].is_to_end.wait()
            await asyncio.gather(*(complete(engine, [i] * 9, SHORT) for i in range(4)))
            assert not stream.ended.is_set()
            await stream.ended.wait()
            stream.check()
        await ending
        assert list(engine._links) == ["r0" if leaving == "r1" else "r1"]
        assert not engine.num_restarts


async def test_a_request_whose_client_leaves_is_computed_no_more(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as (engine, replicas):
        [replica] = replicas.by_id.values()
        async with begun(engine, [1, 2, 3]):
            assert replica._owners
        while replica._owners or engine.stats.num_running:
            await complete(engine, [7], SamplingParams(max_tokens=1))
        assert set(engine.kept()) == {"interactive"}


async def test_a_replica_believes_no_frame_unchecked(tmp_path: Path) -> None:
    replica = await Replica.start(
        "r", CONFIG, program=InProcessReplicas(CONFIG, write_profile(tmp_path))._program
    )
    frames = replica.attach("door")
    decode = unpacker(FromReplica).decode
    assert isinstance(decode(await anext(frames)), Joined)
    good = AddRequest(
        request_id="a",
        prompt_token_ids=token_array((1, 2, 3)),
        params=SamplingParams(max_tokens=1, seed=0),
    )
    for door, frame, message in (
        ("door", b"\xc1", "no frame"),
        ("door", pack({"events": [{"type": "Exec"}], "sent_s": 0.0}), "no frame"),
        ("other", pack(Sent(events=[good], sent_s=0.0)), "no front door"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            replica.take(door, frame)
    bad = {
        "prompt": msgspec.structs.replace(good, prompt_token_ids=token_array((-1,))),
        "maximum context": msgspec.structs.replace(good, prompt_token_ids=token_array((1,)) * 4000),
        "nothing open": msgspec.structs.replace(good, params=SamplingParams(max_tokens=1)),
        "as a grammar only": msgspec.structs.replace(
            good,
            params=msgspec.structs.replace(
                good.params, structured_outputs=StructuredOutputs(regex="a")
            ),
        ),
        "slo_class": msgspec.structs.replace(good, service=ServiceParams(slo_class="none")),
    }
    try:
        for message, request in bad.items():
            replica.take("door", pack(Sent(events=[request], sent_s=0.0)))
            while not isinstance(brought := decode(await anext(frames)), Brought):
                pass
            while not brought.outputs:
                brought = decode(await anext(frames))
            [output] = brought.outputs
            assert output.finish_reason is FinishReason.ERROR
            assert message in (output.error or "")
        assert not replica._owners
    finally:
        await frames.aclose()
        await replica.close()


async def test_a_front_door_that_says_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have died, far away; and one that has nothing to send says so."""
    monkeypatch.setattr(replica_module, "_MOST_SILENT_S", 2.0)
    monkeypatch.setattr(link_module, "_SPEAK_EVERY_S", 0.1)
    async with fleet(tmp_path, 1) as (engine, replicas):
        [replica] = replicas.by_id.values()
        silent = replica.attach("silent")
        await anext(silent)
        request = AddRequest(
            request_id="a",
            prompt_token_ids=token_array((1, 2, 3)),
            params=msgspec.structs.replace(LONG, seed=0),
        )
        replica.take("silent", pack(Sent(events=[request], sent_s=0.0)))
        async for _ in silent:
            pass
        assert len(replica._doors) == 1
        assert not replica._owners
        assert not engine.num_restarts
