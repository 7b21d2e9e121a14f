"""Settings of the KV cache, and of moving its blocks between engines."""

from typing import Annotated, Literal

import msgspec

from legato.core.addresses import is_loopback
from legato.core.config_fields import Config, Flag
from legato.core.errors import ConfigError
from legato.core.ranges import CountOrZero, Seconds, Share, Size, SizeOrZero

KVCacheDType = Literal["auto", "int8"]
BlockSize = Annotated[int, msgspec.Meta(ge=1, le=65_536)]
KVRole = Literal["prefill", "decode", "both"]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]

BLOCK_SIZES = {"cpu": 32, "cuda": 64}
"""Key the kind of device. A GPU's attention reads 64 keys at once, faster from one block."""


class CacheConfig(Config, frozen=True, kw_only=True):
    """Size of the paged KV cache."""

    flag_group = "KV cache"

    block_size: Annotated[
        BlockSize | None, Flag("tokens a block", metavar="TOKENS", default="32; 64 on a GPU")
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType,
        Flag(
            "what keys and values are held in: int8 rounds them, with a scale a token and head, so "
            "that nearly twice the tokens fit",
            default="the model's data type",
        ),
    ] = "auto"
    kv_cache_memory_bytes: Annotated[
        Size | None,
        Flag(
            "size of the cache, such as 512M or 2GiB; on a CPU it is taken at the start",
            one_of="cache size",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        Share | None,
        Flag(
            "instead of a size: on a CPU, the fraction of free memory that the cache may take; on "
            "a GPU, the fraction of its memory that weights, steps and cache may take together",
            metavar="FRACTION",
            default="0.9 of a GPU's, 0.25 of the host's, which other programs want too",
            one_of="cache size",
        ),
    ] = None
    take_memory_when_idle: Annotated[
        bool,
        Flag(
            "on a CPU, take the memory of a cache without a size while no request runs, up to "
            "half of the free memory; otherwise prompts wait while it is taken"
        ),
    ] = True
    enable_prefix_caching: Annotated[
        bool, Flag("keep the blocks of prompts and outputs for requests that begin alike")
    ] = True
    state_checkpoints: Annotated[
        CountOrZero | None,
        Flag(
            "states of recurrent layers kept for later prompts, beside those in free slots of "
            "running requests",
            default="what a fifth of the cache's memory holds",
        ),
    ] = None
    swap_space_bytes: Annotated[
        SizeOrZero,
        Flag(
            "host memory, such as 4GiB, for blocks that a GPU's cache has no more room for",
            default="none",
        ),
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_cache_memory_bytes is not None and self.gpu_memory_utilization is not None:
            raise ConfigError("kv_cache_memory_bytes and gpu_memory_utilization exclude each other")
        if self.swap_space_bytes and not self.enable_prefix_caching:
            raise ConfigError("swap space is for blocks of the prefix cache, which is turned off")
        if self.state_checkpoints and not self.enable_prefix_caching:
            raise ConfigError("state checkpoints are for the prefix cache, which is turned off")

    def resolve(self, device: str) -> "CacheConfig":
        """Replace the default size of a block by a number.

        Args:
            device: the kind that the model is on, "cpu" or "cuda".
        """
        size = self.block_size or BLOCK_SIZES[device]
        return msgspec.structs.replace(self, block_size=size)


class TransferConfig(Config, frozen=True, kw_only=True):
    """Transfer of blocks between engines."""

    flag_group = "prefill and decode apart"

    kv_role: Annotated[
        KVRole | None,
        Flag(
            "compute prompts for other engines to decode, decode prompts of other engines, or "
            "both, as a request's kv_transfer_params asks",
            default="neither",
        ),
    ] = None
    kv_transfer_host: Annotated[
        str, Flag("address at which engines that decode reach this one", metavar="ADDRESS")
    ] = "127.0.0.1"
    kv_transfer_port: Annotated[Port, Flag("port at that address")] = 5600
    kv_transfer_key_file: Annotated[
        str | None,
        Flag(
            "file with the key that all engines and routers of a fleet share; needed wherever the "
            "address is not the machine's own",
            metavar="FILE",
        ),
    ] = None
    kv_transfer_peers: Annotated[
        tuple[str, ...],
        Flag(
            "engines on this machine that prompts may be fetched from where there is no key",
            metavar="HOST:PORT,...",
        ),
    ] = ("127.0.0.1:5600",)
    kv_lease_s: Annotated[
        Seconds,
        Flag(
            "how long a computed prompt is kept for an engine that does not fetch it, and how "
            "long an engine may take to answer before its prompt is computed here"
        ),
    ] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for peer in self.kv_transfer_peers:
            host, _, port = peer.rpartition(":")
            is_port = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
            if not (is_port and is_loopback(host.strip("[]"))):
                raise ConfigError(
                    f"kv_transfer_peers are HOST:PORT on this machine, got {peer!r}; engines on "
                    "others share a --kv-transfer-key-file"
                )

    @property
    def listening_port(self) -> int | None:
        """Port on which other engines ask for blocks; None if this engine only fetches."""
        return None if self.kv_role == "decode" else self.kv_transfer_port
