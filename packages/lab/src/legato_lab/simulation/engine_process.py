"""An engine process that computes nothing: its steps only take the time that a profile says.

It runs in real time, so that routers can be tried without the machines.

    python -m legato_lab.simulation.engine_process PROFILE FD
"""

import sys
from functools import partial

from legato.core.cache_config import BLOCK_SIZES
from legato.core.config import EngineConfig
from legato.core.stats import CacheInfo
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.loop.transfers import Transfers
from legato.engine.main import main
from legato.engine.process.engine_messages import EngineInfo, TransferAddress
from legato.executor.simulated import RealTimeClock
from legato.kv.manager import KVCacheManager
from legato_lab.simulation.link import SimulatedLink
from legato_lab.simulation.machine import MeasuredServer
from legato_lab.simulation.machine_file import load_machine
from legato_lab.simulation.profiles import load_profile
from legato_lab.simulation.timed_mover import timed_transfers

_VOCAB_SIZE = 2**20
"""Prompts may come from any tokenizer."""


def build_simulated(profile: str, config: EngineConfig) -> tuple[EngineLoop, EngineInfo]:
    """Build a simulated engine, as `build_engine` builds a real one.

    Args:
        profile: as of `load_machine`.
        config: only the scheduler's part, prefix caching and the transfer of blocks count.

    Raises:
        ConfigError: there is no such profile, or it lacks data.
    """
    machine = load_machine(profile)
    scheduler = config.scheduler.resolve(machine.max_model_len)
    enable_prefix_caching = config.cache.enable_prefix_caching
    server = MeasuredServer(
        machine=machine,
        scheduler=scheduler,
        enable_prefix_caching=enable_prefix_caching,
    )

    def make_transfers(kv: KVCacheManager) -> Transfers:
        token_bytes = load_profile(profile).kv_token_bytes
        return timed_transfers(config.transfer, kv, token_bytes, profile, SimulatedLink())

    engine, _ = server.start(
        RealTimeClock(),
        is_sharing=enable_prefix_caching,
        make_transfers=None if config.transfer.kv_role is None else make_transfers,
    )
    address: TransferAddress | None = None
    if engine.transfers is not None:
        address = TransferAddress(config.transfer.kv_transfer_host, engine.transfers.port)
    block_size = BLOCK_SIZES["cpu"]
    info = EngineInfo(
        model=config.model.model,
        served_model_names=(config.model.model,),
        max_model_len=machine.max_model_len,
        vocab_size=_VOCAB_SIZE,
        cache=CacheInfo(
            num_blocks=-(-machine.kv_cache_tokens // block_size),
            block_size=block_size,
            dtype="none",
            enable_prefix_caching=enable_prefix_caching,
        ),
        scheduler=scheduler,
        settings={"simulated": profile},
        transfer=address,
    )
    return engine, info


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[2]), partial(build_simulated, sys.argv[1])))
