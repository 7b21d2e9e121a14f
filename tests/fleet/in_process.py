"""Replicas in the front door's own process, whose engines are processes that only last."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

from legato.bench.simulation.engine_process import program
from legato.core.config import EngineConfig
from legato.fleet.replica import Replica
from legato.fleet.replicas import Line

STEP_S = 0.004


def write_profile(folder: Path) -> str:
    """Of a machine whose steps are short."""
    path = folder / "profile.json"
    costs = {"step_s": STEP_S, "row_s": [2e-5] * 5}
    path.write_text(json.dumps({"costs": costs, "max_model_len": 2048, "kv_cache_tokens": 16384}))
    return str(path)


class InProcessReplicas:
    """`Replicas` that a test starts and ends."""

    death = ""

    def __init__(self, config: EngineConfig, profile: str) -> None:
        self.by_id: dict[str, Replica] = {}
        self.lines: dict[str, Line] = {}
        self.num_frames = 0
        self._config = config
        self._program = program(profile)
        self._waiting: list[Line] = []

    async def add(self, replica_id: str) -> Replica:
        replica = await Replica.start(replica_id, self._config, program=self._program)
        self.by_id[replica_id] = replica
        return replica

    async def end(self, replica_id: str) -> None:
        """As Ray does: once nobody is joined to it."""
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
