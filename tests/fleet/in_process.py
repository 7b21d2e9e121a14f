"""A fleet without Ray: replicas in the front door's own process, whose engines are processes that
only last."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from legato.checkpoint.defaults import ModelDefaults
from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.vocabulary import Vocabulary
from legato.engine.client.submissions import Submission
from legato.engine.errors import EngineDeadError
from legato.language.completion import Completion, CompletionDelta
from legato_fleet.config import replica_config, simulated_program
from legato_fleet.engine import FleetEngine
from legato_fleet.replica import Replica
from legato_fleet.replicas import Line
from legato_fleet.routing.request import Role
from tests.engine.submitting import submitted

STEP_S = 0.004


def write_profile(folder: Path) -> str:
    """Of a machine whose steps are short."""
    path = folder / "profile.json"
    costs = {"step_s": STEP_S, "row_s": [2e-5] * 5}
    told = {"max_model_len": 2048, "kv_cache_tokens": 16384, "kv_token_bytes": 1e5}
    path.write_text(json.dumps({"costs": costs, **told}))
    return str(path)


class InProcessReplicas:
    """`Replicas` that a test starts and ends. Args: profile: None where a model is computed."""

    death = ""

    def __init__(self, config: EngineConfig, profile: str | None) -> None:
        self.by_id: dict[str, Replica] = {}
        self.lines: dict[str, Line] = {}
        self.num_frames = 0
        self._config = config
        self._program = None if profile is None else simulated_program(profile)
        self._waiting: list[Line] = []

    async def add(self, replica_id: str, role: Role = "both") -> Replica:
        config = replica_config(self._config, role, "127.0.0.1")
        replica = await Replica.start(replica_id, config, program=self._program)
        self.by_id[replica_id] = replica
        return replica

    async def end(self, replica_id: str) -> None:
        """End it, as Ray does, once no other process is joined to it."""
        replica = self.by_id.pop(replica_id)
        self.lines[replica_id].end()
        while replica._doors:
            await _pause()
        await replica.close()

    async def kill(self, replica_id: str) -> None:
        await self.by_id.pop(replica_id).close()

    async def attach(self, line: Line) -> AsyncGenerator[bytes]:
        while not (free := self.by_id.keys() - self.lines.keys()):
            await _pause()
        replica_id = min(free)
        self.lines[replica_id] = line
        try:
            async for frame in self.by_id[replica_id].attach(line.door_id):
                self.num_frames += 1
                yield frame
        finally:
            del self.lines[replica_id]

    async def send(self, replica_id: str, door_id: str, frame: bytes) -> None:
        self.by_id[replica_id].take(door_id, frame)

    async def close(self) -> None:
        for replica in self.by_id.values():
            await replica.close()


async def _pause() -> None:
    await asyncio.sleep(0.01)


CONFIG = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=8, itl_slo_s=0.5, ttft_slo_s=60.0))
SHORT = SamplingParams(max_tokens=5)
LONG = SamplingParams(max_tokens=1500)
EVERYONES = ServiceParams()
NO_WORDS = Vocabulary.of((), frozenset())


async def no_text() -> tuple[Vocabulary, ModelDefaults]:
    return NO_WORDS, ModelDefaults(eos_token_ids=(), sampling={})


@asynccontextmanager
async def fleet(
    folder: Path,
    num_replicas: int,
    routing: str = "kept-promise",
    *,
    config: EngineConfig = CONFIG,
    is_only_door: bool = True,
) -> AsyncIterator[tuple[FleetEngine, InProcessReplicas]]:
    """A front door that is joined to all of its replicas."""
    replicas = InProcessReplicas(config, write_profile(folder))
    await asyncio.gather(*(replicas.add(f"r{i}") for i in range(num_replicas)))
    engine = await FleetEngine.start(
        config, [replicas], no_text(), routing=routing, is_only_door=is_only_door
    )
    try:
        await joined(engine, num_replicas)
        yield engine, replicas
    finally:
        await engine.close()


async def joined(engine: FleetEngine, num_replicas: int) -> None:
    while len(engine._router.replicas) != num_replicas:
        await asyncio.sleep(0.01)


async def complete(
    engine: FleetEngine,
    prompt: list[int],
    params: SamplingParams,
    service: ServiceParams = EVERYONES,
) -> Completion:
    completion = Completion(0)

    def take(_: int, delta: CompletionDelta) -> None:
        completion.add(delta)

    async with submitted(engine, [prompt], params, take, service=service) as submission:
        await submission.ended.wait()
        submission.check()
    return completion


@asynccontextmanager
async def begun(engine: FleetEngine, prompt: list[int]) -> AsyncIterator[Submission]:
    """A stream whose first token has come."""
    async with submitted(engine, [prompt], LONG, service=EVERYONES) as submission:
        await submission.begun.wait()
        submission.check()
        yield submission


async def ends_because(submission: Submission, why: str) -> None:
    await submission.ended.wait()
    with pytest.raises(EngineDeadError, match=why):
        submission.check()


def home(engine: FleetEngine) -> str:
    """The replica of the one request that runs."""
    [placed] = engine._dispatcher.placed
    return placed.link.replica_id
