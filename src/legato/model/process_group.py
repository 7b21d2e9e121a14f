"""Ranks that are joined by torch.distributed."""

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


class ProcessGroup:
    """A `Communicator` of processes on one machine: over gloo on a CPU.

    Nothing is global, so that several groups can be in one process, and nothing listens beyond
    loopback.

    It is joined before anything is exchanged.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None

    def join(self, meeting_point: Path) -> None:
        """Wait for the others.

        Args:
            meeting_point: a file that is not there yet, the same for all ranks, in a folder that
                nobody else may write to.

        Raises:
            RankLostError: not all ranks have come.
        """
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = _PATIENCE
        with _telling_of_loss():
            store = dist.FileStore(str(meeting_point), self.size)  # type: ignore[attr-defined]
            self._group = dist.ProcessGroupGloo(store, self.rank, self.size, options)

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


@contextmanager
def _telling_of_loss() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"another rank is gone: {error}") from error
