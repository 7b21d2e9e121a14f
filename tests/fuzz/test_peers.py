"""What replicas and front doors tell each other is not believed: broken frames end nothing else."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest

from legato.core.config import EngineConfig
from legato.core.errors import InvalidRequestError
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AbortRequest, AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.stats import EngineStats
from legato.core.token_ids import token_array
from legato.engine.errors import EngineDeadError
from legato.engine.process.channel import pack, unpacker
from legato.language.completion import CompletionDelta
from legato_fleet.engine import FleetEngine
from legato_fleet.replica import Replica
from legato_fleet.replica_messages import Brought, FromReplica, Sent
from legato_fleet.replicas import Line
from tests.engine.submitting import submitted
from tests.fleet.in_process import CONFIG, InProcessReplicas, fleet, joined, no_text, write_profile
from tests.fuzz.frames import broken
from tests.profiles import scaled

_NUM_FRAMES = scaled(200)
_NUM_ROUNDS = scaled(10)
_LIES = 0.4
_MOST_TRIES = 30
_DECODER = unpacker(FromReplica)


def asked(request_id: str) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=token_array(range(1, 80)),
        params=SamplingParams(max_tokens=3, seed=0, logit_bias={3: 1.0}, stop_token_ids=(5,)),
        service=ServiceParams(priority=1, cache_salt="s"),
        eos_token_ids=(2,),
    )


@pytest.mark.endurance
async def test_a_replica_survives_what_a_front_door_sends(tmp_path: Path) -> None:
    program = InProcessReplicas(CONFIG, write_profile(tmp_path))._program
    replica = await Replica.start("r", CONFIG, program=program)
    frames = replica.attach("door")
    await anext(frames)
    engine = replica._supervisor.engine_pid
    rng = random.Random(0)
    num_refused = 0
    try:
        for i in range(_NUM_FRAMES):
            sent = Sent(events=[asked(f"{i}"), AbortRequest(request_id=f"{i - 1}")], sent_s=0.0)
            try:
                replica.take("door", broken(rng, pack(sent)))
            except InvalidRequestError:
                num_refused += 1
            if i % 20 == 0:
                await ended(replica, frames, f"good {i}")
        assert replica._supervisor.engine_pid is engine, "the engine died of it"
        assert 0 < num_refused < _NUM_FRAMES
    finally:
        await frames.aclose()
        await replica.close()


async def ended(replica: Replica, frames: AsyncGenerator[bytes], request_id: str) -> None:
    """A good request comes to its end."""
    replica.take("door", pack(Sent(events=[asked(request_id)], sent_s=0.0)))
    async with asyncio.timeout(60):
        while True:
            brought = _DECODER.decode(await anext(frames))
            outputs = brought.outputs if isinstance(brought, Brought) else []
            for output in outputs:
                if output.request_id == request_id and output.finish_reason is not None:
                    assert output.finish_reason is not FinishReason.ERROR, output.error
                    return


class Liar(InProcessReplicas):
    """Of its two replicas one tells nonsense now and then, mostly such as can be read."""

    def __init__(self, config: EngineConfig, profile: str) -> None:
        super().__init__(config, profile)
        self.rng = random.Random(0)
        self.is_lying = False
        self.num_broken = 0

    async def attach(self, line: Line) -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(super().attach(line)) as frames:
            async for frame in frames:
                is_lie = self._lies_to(line)
                self.num_broken += is_lie
                yield self._lie(frame) if is_lie else frame

    def _lies_to(self, line: Line) -> bool:
        is_bad = self.lines.get("bad") is line
        return self.is_lying and is_bad and self.rng.random() < _LIES

    def _lie(self, frame: bytes) -> bytes:
        for _ in range(_MOST_TRIES):
            lie = broken(self.rng, frame)
            with contextlib.suppress(msgspec.DecodeError, ValueError):
                _DECODER.decode(lie)
                return lie
        return b"\xc1"


@pytest.mark.endurance
@pytest.mark.parametrize("routing", ["kept-promise", "round-robin"])
async def test_a_front_door_survives_what_a_replica_tells(tmp_path: Path, routing: str) -> None:
    """What runs elsewhere goes on, and what ran there ends, with an error or an answer."""
    replicas = Liar(CONFIG, write_profile(tmp_path))
    await asyncio.gather(replicas.add("bad"), replicas.add("good"))
    engine = await FleetEngine.start(
        CONFIG, [replicas], no_text(), routing=routing, is_only_door=True
    )
    try:
        await joined(engine, 2)
        replicas.is_lying = True
        for _ in range(_NUM_ROUNDS):
            answers = await asyncio.gather(
                *(answered(engine) for _ in range(6)),
                return_exceptions=True,
            )
            assert all(not isinstance(one, BaseException) or is_told(one) for one in answers)
        assert replicas.num_broken > _NUM_ROUNDS // 2
        assert "good" in engine._router.replicas
        assert engine.num_unfinished == 0
        assert not engine._dispatcher.placed
    finally:
        await engine.close()


async def answered(engine: FleetEngine, max_tokens: int = 8) -> int:
    """The number of its tokens."""
    num_tokens = 0

    def take(_: int, delta: CompletionDelta) -> None:
        nonlocal num_tokens
        num_tokens += len(delta.token_ids)

    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    async with (
        asyncio.timeout(60),
        submitted(engine, [[7] * 40], params, take) as submission,
    ):
        await submission.ended.wait()
        submission.check()
    return num_tokens


async def test_a_replica_tells_of_no_request_of_another(tmp_path: Path) -> None:
    """Not that it ended, either."""
    async with fleet(tmp_path, 2, "round-robin") as (engine, _):
        own = asyncio.create_task(answered(engine, max_tokens=200))
        while not engine._dispatcher.placed._halves:
            assert not own.done()
            await asyncio.sleep(0)
        [(sent_id, half)] = engine._dispatcher.placed._halves.items()
        [other] = (link for link in engine._links.values() if link is not half.link)
        end = RequestOutput(request_id=sent_id, finish_reason=FinishReason.STOP)
        lie = Brought(outputs=[end], stats=EngineStats(), kv_events=[], sent_s=time.monotonic())
        engine._take(other, lie)
        assert await own == 200


def is_told(error: BaseException) -> bool:
    """Whether it is what a client is told, not what a bug is."""
    return isinstance(error, EngineDeadError | InvalidRequestError | RuntimeError)
