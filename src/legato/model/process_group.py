"""Joins ranks by torch.distributed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from legato.model.communicator import RankLostError

_PATIENCE = timedelta(seconds=120)
"""Longest wait of one rank for another, in the middle of a step or at the start."""
_LOOPBACK = "127.0.0.1"
_CPU = torch.device("cpu")


class ProcessGroup:
    """A `Communicator` of processes on one machine: over gloo on a CPU, over NCCL on GPUs.

    Nothing is global, so several groups fit in one process, and nothing listens beyond loopback.
    Over NCCL, an exchange is queued on the device's current stream, in a CUDA graph too: on NCCL's
    own stream, it would begin and end with events that both streams wait for, twice a layer. A rank
    that waits there for a lost one gets no error.

    Call `join` before any exchange.

    Args:
        device: this rank's own, where all tensors are.
    """

    def __init__(self, rank: int, size: int, device: torch.device = _CPU) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._group: Any = None

    def join(self, meeting_point: Path) -> None:
        """Wait for the other ranks.

        Args:
            meeting_point: a file that does not exist yet, the same for all ranks, in a folder that
                no other user can write to.

        Raises:
            RankLostError: not all ranks have come.
        """
        with _telling_of_loss():
            store = dist.FileStore(str(meeting_point), self.size)  # type: ignore[attr-defined]
            make = _gloo if self._device.type == "cpu" else _nccl
            self._group = make(store, self.rank, self.size)
            self.sum(torch.zeros(1, device=self._device)).item()  # returns once all ranks are here

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        options = dist.AllreduceOptions()
        options.asyncOp = False
        with _telling_of_loss():
            self._group.allreduce([values], options).wait()
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        options = dist.GatherOptions()
        options.rootRank = 0
        options.asyncOp = False
        if self.rank:
            with _telling_of_loss():
                self._group.gather([], [values], options).wait()
            return values
        parts = [torch.empty_like(values) for _ in range(self.size)]
        with _telling_of_loss():
            self._group.gather([parts], [values], options).wait()
        return torch.cat(parts, dim=1)


def _gloo(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = _PATIENCE
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int) -> Any:
    # Ranks find each other over sockets, even if they exchange data over NVLink.
    os.environ["NCCL_SOCKET_IFNAME"] = "=lo"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _PATIENCE
    return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _telling_of_loss() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"another rank is gone: {error}") from error
