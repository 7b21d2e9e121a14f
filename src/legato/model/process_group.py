"""Ranks that are joined by torch.distributed."""

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
"""How long a rank waits for another in the midst of a step, or at the start."""
_LOOPBACK = "127.0.0.1"
_CPU = torch.device("cpu")


class ProcessGroup:
    """A `Communicator` of processes on one machine: over gloo on a CPU, over NCCL on GPUs.

    Nothing is global, so that several groups can be in one process, and nothing listens beyond
    loopback. Over NCCL, what is asked is done on the device, behind what its stream was asked
    before, in a graph too. Who waits there for a rank that is lost is not told.

    It is joined before anything is exchanged.

    Args:
        device: of all tensors, this rank's own.
    """

    def __init__(self, rank: int, size: int, device: torch.device = _CPU) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._group: Any = None

    def join(self, meeting_point: Path) -> None:
        """Wait for the others.

        Args:
            meeting_point: a file that is not there yet, the same for all ranks, in a folder that
                nobody else may write to.

        Raises:
            RankLostError: not all ranks have come.
        """
        with _telling_of_loss():
            store = dist.FileStore(str(meeting_point), self.size)  # type: ignore[attr-defined]
            make = _gloo if self._device.type == "cpu" else _nccl
            self._group = make(store, self.rank, self.size)
            self.sum(torch.zeros(1, device=self._device)).item()  # all are there

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        with _telling_of_loss():
            self._group.allreduce([values]).wait()
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        options = dist.GatherOptions()
        options.rootRank = 0
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
    # Ranks meet over sockets, even where they exchange over NVLink.
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
