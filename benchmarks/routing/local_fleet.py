"""`legato fleet` where Ray is not installed: the same front door, router and engine processes.

    python -m benchmarks.routing.local_fleet --simulate PROFILE [any flags of `legato fleet`]

Messages go to replicas without a network between. A replica that has gone is not replaced.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable
from functools import partial

from legato.api.run import serve
from legato.checkpoint.defaults import ModelDefaults
from legato.cli.flags import (
    add_engine_flags,
    add_flags,
    add_server_flags,
    engine_config,
    given_fields,
    server_config,
)
from legato.cli.serve import announce
from legato.core.config import EngineConfig
from legato.core.vocabulary import Vocabulary
from legato_fleet.config import FleetConfig, simulated_program
from legato_fleet.engine import FleetEngine
from legato_fleet.replica import Replica
from legato_fleet.replicas import Line


class LocalReplicas:
    """`Replicas` of one front door, in its own process; their engines are processes below it."""

    death = ""

    def __init__(self, replicas: dict[str, Replica]) -> None:
        self._replicas = replicas
        self._unjoined = [*replicas]
        self._for_ever = asyncio.Event()

    async def attach(self, line: Line) -> AsyncGenerator[bytes]:
        """See `Replicas.attach`."""
        if not self._unjoined:
            await self._for_ever.wait()
        async for frame in self._replicas[self._unjoined.pop(0)].attach(line.door_id):
            yield frame

    async def send(self, replica_id: str, door_id: str, frame: bytes) -> None:
        """See `Replicas.send`."""
        self._replicas[replica_id].take(door_id, frame)

    async def close(self) -> None:
        """See `Replicas.close`."""
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))


def main() -> int:
    arguments = _parse()
    fleet = FleetConfig(**given_fields(arguments, FleetConfig))
    config, server = engine_config(arguments), server_config(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return serve(config, server, on_ready=announce, start_engine=partial(_start, config, fleet))


async def _start(
    config: EngineConfig, fleet: FleetConfig, text: Awaitable[tuple[Vocabulary, ModelDefaults]]
) -> FleetEngine:
    steps_last = None if fleet.simulate is None else simulated_program(fleet.simulate)
    assert fleet.replicas is not None
    replica_ids = [str(place) for place in range(fleet.replicas)]
    replicas = await asyncio.gather(
        *(Replica.start(one, config, program=steps_last) for one in replica_ids)
    )
    local = LocalReplicas(dict(zip(replica_ids, replicas, strict=True)))
    return await FleetEngine.start(config, [local], text, routing=fleet.routing, is_only_door=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_flags(parser, FleetConfig)
    add_engine_flags(parser)
    add_server_flags(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
