"""Moves no blocks, but takes a link's time for them, for engines that compute nothing.

Everything else of a transfer is real.
"""

import secrets
import time

from legato.core.cache_config import TransferConfig
from legato.core.errors import ConfigError
from legato.engine.loop.transfers import Transfers
from legato.kv.manager import KVCacheManager
from legato.transfer.block_memory import CacheMemory, Region, Spans
from legato.transfer.keys import read_key
from legato.transfer.mover import ReadState
from legato.transfer.transport import Transport
from legato_lab.simulation.link import LinkTraffic, SimulatedLink


class TimedMover:
    """One end of a link. Reads come one after another."""

    def __init__(self, link: SimulatedLink) -> None:
        name = secrets.token_hex(8)
        self.metadata = name.encode()
        self._name = name
        self._traffic = LinkTraffic(link)

    def connect(self, metadata: bytes) -> str:
        return metadata.decode()

    def disconnect(self, peer: str) -> None:
        """Nothing to forget."""

    def read(self, peer: str, spans: Spans, gpu: int | None) -> "TimedRead":  # noqa: ARG002
        num_bytes = float(spans[:, 2].sum())
        return TimedRead(self._traffic.send(peer, self._name, num_bytes, time.monotonic()))

    def progress(self) -> None:
        """Nothing to do: reads progress by time alone."""

    def close(self) -> None:
        """Nothing to close."""


class TimedRead:
    """Args: ends_s: when the read is done."""

    def __init__(self, ends_s: float) -> None:
        self._ends_s = ends_s

    def state(self) -> ReadState:
        return "done" if time.monotonic() >= self._ends_s else "running"

    def cancel(self) -> bool:
        return True


def timed_transfers(
    config: TransferConfig,
    kv: KVCacheManager,
    token_bytes: float | None,
    profile: str,
    link: SimulatedLink,
) -> Transfers:
    """Make the transfers of a simulated engine, as `make_transfers` makes real ones.

    Args:
        token_bytes: of a token's keys and values; None if the profile does not say.
        profile: engines with another profile are refused.

    Raises:
        ConfigError: as `make_transfers`, or the profile does not say `token_bytes`.
    """
    if not token_bytes:
        raise ConfigError(
            f"{profile} tells no kv_token_bytes, which a token's keys and values take"
        )
    region = Region(
        address=0,
        num_planes=1,
        num_blocks=kv.num_blocks,
        block_bytes=max(1, round(token_bytes * kv.block_size)),
    )
    transport = Transport(
        TimedMover(link),
        CacheMemory(groups=((region,),)),
        block_size=kv.block_size,
        layout={"the profile": profile},
        host=config.kv_transfer_host,
        port=config.listening_port,
        key=read_key(config),
        lease_s=config.kv_lease_s,
    )
    return Transfers(kv, transport)
