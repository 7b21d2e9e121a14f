"""A fleet behind HTTP, without Ray: `python -m tests.fleet.server PROFILE --port 0 ...`."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable
from pathlib import Path

from legato.api.run import serve
from legato.checkpoint.defaults import ModelDefaults
from legato.cli.flags import add_engine_flags, add_server_flags, engine_config, server_config
from legato.cli.serve import announce
from legato.core.config import EngineConfig
from legato.core.vocabulary import Vocabulary
from legato.engine.client.engine import Engine
from legato_fleet.engine import FleetEngine
from tests.api.launch import ServerProcess
from tests.fleet.in_process import InProcessReplicas, joined

REPLICAS = ("left", "right")


def launched(folder: Path, profile: str, *flags: str) -> ServerProcess:
    """With `REPLICAS`, whose steps last as the profile says."""
    arguments = [profile, *flags]
    return ServerProcess(arguments, folder / "fleet.log", program="tests.fleet.server")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("profile")
    add_engine_flags(parser)
    add_server_flags(parser)
    args = parser.parse_args()
    config = engine_config(args)

    async def start(text: Awaitable[tuple[Vocabulary, ModelDefaults]]) -> Engine:
        return await _start(config, args.profile, text)

    return serve(config, server_config(args), on_ready=announce, start_engine=start)


async def _start(
    config: EngineConfig, profile: str, text: Awaitable[tuple[Vocabulary, ModelDefaults]]
) -> FleetEngine:
    replicas = InProcessReplicas(config, profile)
    await asyncio.gather(*map(replicas.add, REPLICAS))
    engine = await FleetEngine.start(
        config, [replicas], text, routing="round-robin", is_only_door=True
    )
    await joined(engine, len(REPLICAS))
    return engine


if __name__ == "__main__":
    sys.exit(main())
