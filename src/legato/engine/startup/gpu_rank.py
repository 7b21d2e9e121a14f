"""A rank on a GPU of its own."""

from pathlib import Path

import torch

from legato.core.rows import GPU_ROWS
from legato.engine.startup.gpu import GpuPart
from legato.engine.startup.machinery import Machinery, Wanted
from legato.executor.ranks.messages import Followers
from legato.executor.untaken_pages import UntakenPages
from legato.gpu import device
from legato.gpu.ranks import GpuFollower, LeadExecutor
from legato.kv.manager import KVCacheManager
from legato.model.base import CacheSpec
from legato.model.process_group import ProcessGroup


class GpuRank:
    """A `RankPart`."""

    untaken: UntakenPages | None = None

    def __init__(self, wanted: Wanted, rank: int) -> None:
        self._wanted = wanted
        self._device = device.CudaDevice(torch.device(wanted.device.type, rank))
        self._group = ProcessGroup(
            rank, wanted.config.model.tensor_parallel_size, self._device.torch_device
        )
        self.cannot_be_told = self._device.torch_device.type != "cpu"
        self._part = GpuPart(wanted, self._device, self._group)

    def join(self, meeting_point: Path) -> None:
        self._group.join(meeting_point)

    def cache_bytes(self) -> int:
        return self._part.cache_bytes()

    def make_cache(self, num_blocks: int) -> None:
        self._part.make_cache(num_blocks)

    def follower(self, num_host_slots: int) -> GpuFollower:
        part = self._part
        return GpuFollower(
            part.program,
            self._device,
            part.runner,
            depth=part.depth,
            num_host_slots=num_host_slots,
        )

    def machinery(self, cache: CacheSpec, kv: KVCacheManager, followers: Followers) -> Machinery:
        part = self._part
        executor = LeadExecutor(
            part.program,
            self._device,
            part.runner,
            followers=followers,
            depth=part.depth,
            num_host_slots=kv.num_host_slots,
            grammar=self._wanted.grammar,
        )
        return Machinery(part.model, cache, kv, executor, part.program.blocks, GPU_ROWS, "triton")
