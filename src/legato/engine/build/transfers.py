"""Connects an engine to other engines, to send and fetch blocks."""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from functools import partial

import torch

from legato.checkpoint.checkpoint import Checkpoint
from legato.core.addresses import is_loopback
from legato.core.cache_config import TransferConfig
from legato.engine.loop.transfers import Transfers
from legato.engine.loop.whole_transfers import WholeTransfers
from legato.kv.manager import KVCacheManager
from legato.model.model import CacheGroup, CacheSpec
from legato.transfer.block_memory import CacheMemory, Region
from legato.transfer.keys import read_key
from legato.transfer.mover import Mover
from legato.transfer.nixl_mover import NixlMover
from legato.transfer.protocol import Layout
from legato.transfer.transport import Transport

_SAMPLED = 64
"""Numbers of each weight that identify a checkpoint."""


def nixl_mover(config: TransferConfig, memory: CacheMemory) -> Mover:
    """Make a mover between processes, on one machine or several."""
    name = f"legato-{secrets.token_hex(8)}"
    return NixlMover(name, memory, is_local=is_loopback(config.kv_transfer_host))


def make_transfers(
    config: TransferConfig,
    kv: KVCacheManager,
    memory: CacheMemory,
    layout: Layout,
    make_mover: Callable[[TransferConfig, CacheMemory], Mover] = nixl_mover,
) -> Transfers:
    """Start to listen for other engines, unless this engine only fetches.

    Args:
        memory: of the cache.
        layout: layout of the blocks.

    Raises:
        ConfigError: NIXL is missing, the port cannot be opened, or any program could reach it.
    """
    key = read_key(config)
    gpu = memory.gpu
    sizes = (f"{region.num_planes} x {region.block_bytes}" for region in memory.regions)
    transport = Transport(
        make_mover(config, memory),
        memory,
        block_size=kv.block_size,
        layout=layout | {"the bytes of blocks and states": ", ".join(sizes)},
        host=config.kv_transfer_host,
        port=config.listening_port,
        key=key,
        lease_s=config.kv_lease_s,
        prepare=_nothing if gpu is None else partial(torch.cuda.set_device, gpu),
    )
    is_copying = gpu is not None and kv.num_host_slots > 0
    return (WholeTransfers if kv.transfers_whole else Transfers)(
        kv, transport, partial(torch.cuda.synchronize, gpu) if is_copying else _nothing
    )


def cache_memory(
    groups: Sequence[torch.Tensor], states: Sequence[torch.Tensor] = ()
) -> CacheMemory:
    """Return the addresses of a cache.

    Args:
        groups: blocks of each group, [layers, planes, num_blocks, numbers of a block].
        states: states of recurrent layers, [num_slots, ...] each.
    """
    device = groups[0].device
    regions = [
        (
            Region(
                address=blocks.data_ptr(),
                num_planes=blocks.shape[0] * blocks.shape[1],
                num_blocks=blocks.shape[2],
                block_bytes=blocks.shape[3] * blocks.itemsize,
            ),
        )
        for blocks in groups
    ]
    parts = [
        Region(
            address=part.data_ptr(),
            num_planes=1,
            num_blocks=len(part),
            block_bytes=part[0].numel() * part.itemsize,
        )
        for part in states
        if part.numel()
    ]
    return CacheMemory(
        groups=(*regions, *([tuple(parts)] if parts else [])),
        gpu=(device.index or 0) if device.type == "cuda" else None,
    )


def _nothing() -> None:
    """On a CPU a copy is complete when the call returns."""


def cache_layout(
    checkpoint: Checkpoint,
    cache: CacheSpec,
    groups: Sequence[CacheGroup],
    *,
    block_size: int,
    kernels: str,
) -> Layout:
    """Return what two engines must share to exchange blocks; key: its name in messages."""
    return {
        "the checkpoint": _fingerprint(checkpoint),
        "--block-size": str(block_size),
        "--kv-cache-dtype": _form(cache),
        "the number of layers": str(cache.num_layers),
        "the windows and the sizes of a token's keys": _sizes(groups),
        "--kernels": kernels,
    }


def _form(cache: CacheSpec) -> str:
    """Name the form of numbers, for codes of heads that are not mixed mean other numbers."""
    name = str(cache.kept_dtype).removeprefix("torch.")
    return f"{name} of mixed heads" if cache.is_quantized else name


def _sizes(groups: Sequence[CacheGroup]) -> str:
    """Describe the layers of each group: their window, their number, and what they keep."""
    return "; ".join(
        f"{group.window} {len(group.layers)} x {group.cache.layer_numbers}" for group in groups
    )


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Hash a few numbers of each weight."""
    digest = hashlib.sha256()
    for name, weight in sorted(checkpoint.tensors(torch.device("cpu")), key=lambda pair: pair[0]):
        parts = [weight] if isinstance(weight, torch.Tensor) else weight.parts[:2]
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        for part in parts:
            digest.update(part.flatten()[:_SAMPLED].to(torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]
