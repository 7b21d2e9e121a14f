"""What is recorded of a fleet: steps of each replica, on the front door's clock."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.cli.explain import explanation
from legato.core.stats import EngineStats, TenantStats
from legato.core.step_record import RequestSent, StepBegun
from legato.observe.traces.attribution import Attribution
from legato.observe.traces.request_story import RequestStory, read_stories
from legato.observe.traces.tracer import Tracer
from legato_fleet.engine import FleetEngine
from legato_fleet.records import ForeignClock
from legato_fleet.totals import FleetTotals
from tests.fleet.in_process import SHORT, begun, complete, ends_because, fleet, home


async def traced(engine: FleetEngine, path: Path) -> Tracer:
    return Tracer(engine.activity.records, path, {}, 2**20)


def stories_of(path: Path) -> list[RequestStory]:
    """A trace without answers holds a request until its end."""
    return list(read_stories(path))


async def test_a_trace_tells_of_each_replica_what_it_did(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, "round-robin") as (engine, _):
        seen: list[str] = []
        engine.activity.on_step = lambda step: seen.append(step.replica_id)
        await complete(engine, [9] * 9, SHORT)
        assert seen, "steps are told without anybody's asking for records"
        assert engine.activity.recent.steps
        tracer = await traced(engine, tmp_path / "trace.jsonl")
        await asyncio.gather(*(complete(engine, [i] * 90, SHORT) for i in range(1, 7)))
        await tracer.stop()
        assert set(seen) == {"r0", "r1"}
    stories = stories_of(tmp_path / "trace.jsonl")
    assert len(stories) == 6
    for story in stories:
        assert story.arrived is not None
        assert story.ended is not None
        assert story.ended.num_output_tokens == 5
        [replica_id] = story.replica_ids
        assert {step.record.replica_id for step in story.steps} == {replica_id}
        first = Attribution(story).first_token()
        assert first is not None
        assert sum(first.parts.values()) == pytest.approx(first.seconds)
        assert "unrecorded" not in first.parts
        assert first.parts["own_prefill"] > 0
        told = "\n".join(explanation(story, Attribution(story), 1))
        assert f"sent to replica {replica_id}" in told
    assert sorted(story.replica_ids[0] for story in stories) == ["r0"] * 3 + ["r1"] * 3


async def test_a_trace_says_what_a_replica_lost(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, "round-robin") as (engine, replicas):
        tracer = await traced(engine, tmp_path / "trace.jsonl")
        async with begun(engine, [1, 2, 3]) as stream:
            pid = replicas.by_id[home(engine)]._supervisor.engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await ends_because(stream, "died while it held")
        await tracer.stop()
    [story] = stories_of(tmp_path / "trace.jsonl")
    assert story.ended is not None
    assert "died while it held" in (story.ended.error or "")


async def test_who_watches_is_told_of_steps_that_begin(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, "round-robin") as (engine, replicas):
        with engine.activity.live.subscribe() as live:
            await complete(engine, [1] * 90, SHORT)
            await complete(engine, [2] * 90, SHORT)
            told = live.take_now()
        begun_at = {record.replica_id for record in told if isinstance(record, StepBegun)}
        assert begun_at == {"r0", "r1"}
        assert len([record for record in told if isinstance(record, RequestSent)]) == 2
        await complete(engine, [3], SHORT)
        await complete(engine, [4], SHORT)
        assert not any(replica._is_announcing for replica in replicas.by_id.values())


@given(
    behind_s=st.floats(-1e4, 1e4),
    ways_s=st.lists(st.floats(0.0, 0.5), min_size=1, max_size=20),
)
def test_the_fastest_message_tells_how_clocks_differ(behind_s: float, ways_s: list[float]) -> None:
    clock = ForeignClock()
    for i, way_s in enumerate(ways_s):
        told_s = clock.note(i - behind_s, i + way_s)
    assert behind_s - 1e-6 <= told_s <= behind_s + min(ways_s) + 1e-4 * len(ways_s) + 1e-6


def test_counts_never_fall() -> None:
    def stats(num: int, running: int) -> EngineStats:
        tenant = TenantStats(
            name="a", num_running=running, num_waiting=0, num_refused=num, service_s=num
        )
        return EngineStats(
            num_preemptions=num,
            num_running=running,
            kv_usage=0.5,
            num_cached_blocks=10,
            tenants=(tenant,),
        )

    totals = FleetTotals()
    assert totals.of([]) == EngineStats()
    totals.note_gone(stats(3, running=4))
    totals.note_tried_again("a")
    total = totals.of([stats(5, running=1), stats(0, running=1)])
    assert (total.num_preemptions, total.num_running) == (8, 2)
    assert (total.kv_usage, total.num_cached_blocks) == (0.5, 10)
    [tenant] = total.tenants
    assert (tenant.num_refused, tenant.service_s, tenant.num_running) == (7, 8, 2)
