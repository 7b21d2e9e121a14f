"""The engine process on the real model, and faults of it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import psutil
import pytest

from legato.checkpoint.defaults import ModelDefaults, load_defaults
from legato.checkpoint.source import resolve_source
from legato.core.block_hash import BlockHash, block_hashes
from legato.core.cache_config import CacheConfig
from legato.core.config import (
    DEFAULT_MODEL,
    CalibrationConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from legato.core.errors import ConfigError, InvalidRequestError
from legato.core.outputs import FinishReason
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams, SloClass
from legato.core.step_record import EngineRecord, RequestEnded, RequestSent, StepBegun, StepRecord
from legato.core.vocabulary import Vocabulary
from legato.engine.client.client import EngineClient
from legato.engine.client.deliveries import RecentGaps
from legato.engine.client.submissions import Submission
from legato.engine.errors import EngineDeadError, OverloadedError
from legato.language.completion import Completion, CompletionDelta
from legato.language.tokenizer.tokenizer import load_tokenizer
from tests.engine.submitting import submitted
from tests.exact import EXACT_MODEL
from tests.forks.process import runs
from tests.kv.cache_watcher import CacheWatcher

pytestmark = pytest.mark.usefixtures("forked_engines")

CONFIG = EngineConfig(
    model=ModelConfig(max_model_len=2100, num_threads=1, **EXACT_MODEL),
    cache=CacheConfig(kv_cache_memory_bytes=2**28),
    scheduler=SchedulerConfig(max_num_seqs=2, max_waiting=2),
)
SOURCE = resolve_source(DEFAULT_MODEL)
TOKENIZER = load_tokenizer(SOURCE)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
ONE = SamplingParams(temperature=0.0, max_tokens=1)
LONG = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)


async def load_text() -> tuple[Vocabulary, ModelDefaults]:
    return TOKENIZER.vocabulary, load_defaults(SOURCE, TOKENIZER.eos_token_id)


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(CONFIG, load_text())
    yield client
    children = psutil.Process().children()
    engines = [child for child in children if runs(child, "legato.engine.main")]
    await client.close()
    assert not any(engine.is_running() for engine in engines)


async def complete(
    client: EngineClient, params: SamplingParams, num_prompts: int = 1
) -> list[Completion]:
    completions = [Completion(i) for i in range(num_prompts * params.n)]

    def take(index: int, delta: CompletionDelta) -> None:
        completions[index].add(delta)

    prompts = [TOKENIZER.encode("Once upon a time")] * num_prompts
    async with submitted(client, prompts, params, take) as submission:
        await submission.ended.wait()
        submission.check()
    return completions


@asynccontextmanager
async def begun(
    client: EngineClient, take: Callable[[int, CompletionDelta], object] = lambda *_: None
) -> AsyncIterator[Submission]:
    """A stream whose first token has come."""
    async with submitted(client, [[1, 2, 3]], LONG, take) as submission:
        await submission.begun.wait()
        yield submission


def kill_engine(client: EngineClient) -> None:
    """And let the client take no notice yet."""
    engine = client._supervisor._engine
    assert engine is not None
    os.kill(engine.pid, signal.SIGKILL)


async def serving(client: EngineClient) -> None:
    """Wait for the next engine, and no longer."""
    dead = client._supervisor._engine
    while client._supervisor._engine in (None, dead):
        assert client.is_alive
        await asyncio.sleep(0.001)


async def idle(client: EngineClient) -> None:
    while client.stats.num_running or client.stats.num_waiting:
        await asyncio.sleep(0.01)


async def test_an_error_in_noting_a_delivery_ends_that_stream_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slo = SchedulerConfig(
        slo_classes={"bad": SloClass(itl_s=7.0), "good": SloClass(itl_s=8.0)}, max_num_seqs=2
    )
    config = msgspec.structs.replace(
        CONFIG, scheduler=slo, calibration=CalibrationConfig(calibrate=False)
    )
    client = await EngineClient.start(config, load_text())
    add = RecentGaps.add

    def failing(gaps: RecentGaps, gap_s: float, now_s: float) -> None:
        if gaps._promise_s == 7.0:
            raise OverflowError("too small a promise")
        add(gaps, gap_s, now_s)

    monkeypatch.setattr(RecentGaps, "add", failing)
    ends: dict[str, list[FinishReason]] = {"bad": [], "good": []}

    async def run(name: str) -> None:
        def take(_: int, delta: CompletionDelta) -> None:
            if delta.finish_reason is not None:
                ends[name].append(delta.finish_reason)

        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        service = ServiceParams(slo_class=name)
        async with submitted(client, [[1, 2, 3]], params, take, service=service) as submission:
            await submission.ended.wait()
            submission.check()

    try:
        async with asyncio.timeout(60):
            bad, good = await asyncio.gather(run("bad"), run("good"), return_exceptions=True)
            assert isinstance(bad, OverflowError)
            assert good is None
            assert ends == {"bad": [], "good": [FinishReason.LENGTH]}
            assert client.is_alive
            await idle(client)
            await run("good")
    finally:
        await client.close()


async def test_completions_overload_and_aborts(client: EngineClient) -> None:
    (alone,) = await complete(client, GREEDY)
    assert alone.finish_reason is FinishReason.LENGTH
    both = await complete(client, SamplingParams(temperature=0.0, max_tokens=8, n=2))
    assert [c.text for c in both] == [alone.text, alone.text]

    with pytest.raises(OverloadedError) as refusal:
        await complete(client, SamplingParams(max_tokens=2000, ignore_eos=True, n=8))
    assert refusal.value.retry_after_s > 0
    await idle(client)  # the accepted ones were aborted with the rest

    async with begun(client):
        assert client.stats.num_running == 1
    await idle(client)
    (stopped,) = await complete(client, SamplingParams(max_tokens=2000, stop=(" ",), seed=1))
    assert stopped.finish_reason is FinishReason.STOP
    await idle(client)


async def test_prompts_are_submitted_together_and_one_that_is_bad_ends_them_all(
    client: EngineClient,
) -> None:
    (alone,) = await complete(client, GREEDY)
    both = await complete(client, GREEDY, num_prompts=2)
    assert [c.token_ids for c in both] == [alone.token_ids, alone.token_ids]

    with pytest.raises(InvalidRequestError, match="empty"):
        async with submitted(client, [[1, 2, 3], []], LONG):
            pytest.fail("it cannot be submitted")
    await idle(client)


async def test_what_a_taker_raises_ends_its_submission_and_no_other(client: EngineClient) -> None:
    taken = 0

    def take(_prompt_index: int, _delta: CompletionDelta) -> None:
        nonlocal taken
        taken += 1
        if taken == 5:
            raise RuntimeError("no more")

    async with begun(client, take) as submission:
        (other,) = await complete(client, SamplingParams(max_tokens=40, ignore_eos=True))
        assert len(other.token_ids) == 40
        with pytest.raises(RuntimeError, match="no more"):
            submission.check()
        await idle(client)
    assert taken == 5


async def test_a_killed_engine_is_started_again(client: EngineClient) -> None:
    """What has begun ends with an error; what waits is computed by the next engine, once."""
    (alone,) = await complete(client, GREEDY)
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(begun(client)) for _ in range(2)]
        waiting = asyncio.create_task(complete(client, GREEDY))
        while client.stats.num_waiting == 0:
            await asyncio.sleep(0.01)
        kill_engine(client)
        for submission in streams:
            await submission.ended.wait()
            with pytest.raises(EngineDeadError, match="died") as death:
                submission.check()
            assert death.value.retry_after_s is not None
    with pytest.raises(EngineDeadError, match="restarted"):
        await complete(client, GREEDY)
    (again,) = await waiting
    assert again.token_ids == alone.token_ids
    assert client.is_alive
    assert client.num_restarts == 1

    waiting = asyncio.create_task(complete(client, GREEDY))
    await asyncio.sleep(0)
    kill_engine(client)
    await serving(client)
    kill_engine(client)
    with pytest.raises(EngineDeadError, match="died"):
        await waiting


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(model=ModelConfig(model="/does/not/exist.gguf")),
        EngineConfig(cache=CacheConfig(kv_cache_memory_bytes=1000)),
        EngineConfig(model=ModelConfig(max_model_len=10**9)),
    ],
)
async def test_bad_settings_are_refused_at_the_start(config: EngineConfig) -> None:
    with pytest.raises(ConfigError):
        await EngineClient.start(config, load_text())


async def test_who_watches_hears_of_a_step_before_it_is_over(client: EngineClient) -> None:
    """And so of a request when it is sent; nothing of either comes in any other records."""
    with client.activity.live.subscribe() as live, client.activity.records.subscribe() as records:
        await complete(client, GREEDY)
        sent, *begun = live.take_now()
        assert isinstance(sent, RequestSent)
        assert all(isinstance(step, StepBegun) for step in begun)
        steps = [record for record in records.take_now() if isinstance(record, StepRecord)]
        assert [s.step_id for s in steps] == [s.step_id for s in begun if isinstance(s, StepBegun)]
        assert list(client.activity.recent.steps)[-len(steps) :] == steps
    await complete(client, GREEDY)
    assert live.take_now() == []


async def test_records_come_while_somebody_listens_from_the_next_engine_too(
    client: EngineClient,
) -> None:
    async def ended() -> list[RequestEnded]:
        await complete(client, GREEDY)
        records: list[EngineRecord] = []
        while not (ends := [r for r in records if isinstance(r, RequestEnded)]):
            records += await subscription.take()
        steps = [record for record in records if isinstance(record, StepRecord)]
        assert len(steps) == GREEDY.max_tokens
        assert all(s.received_s is not None and s.received_s >= s.ended_s for s in steps)
        return ends

    await complete(client, GREEDY)
    with client.activity.records.subscribe() as subscription:
        [first] = await ended()
        kill_engine(client)
        await serving(client)
        [second] = await ended()
    assert first.finish_reason is second.finish_reason is FinishReason.LENGTH
    await complete(client, GREEDY)
    assert await subscription.take() == []


async def test_who_watches_the_cache_knows_it_from_the_next_engine_too(
    client: EngineClient,
) -> None:
    async def computed(token_id: int) -> list[BlockHash]:
        """Names of the full blocks of a prompt that has been computed."""
        prompt = [token_id] * 70
        async with submitted(client, [prompt], ONE) as submission:
            await submission.ended.wait()
            submission.check()
        return block_hashes(prompt, client.info.cache.block_size)

    early = await computed(7)
    seen, later = CacheWatcher(), CacheWatcher()
    client.watch_cache(seen.take)
    late = await computed(8)
    assert seen.hashes == {*early, *late}
    client.watch_cache(later.take)
    assert await computed(7) == early
    assert later.hashes == seen.hashes == {*early, *late}

    kill_engine(client)
    await serving(client)
    assert seen.hashes == later.hashes == set()
    names = await computed(9)
    assert seen.hashes == later.hashes == {*names}
