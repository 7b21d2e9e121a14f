"""Ranks as threads of one process, joined by the real process group."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from legato.model.communicator import Communicator
from legato.model.process_group import ProcessGroup

Result = TypeVar("Result")


def on_all_ranks(size: int, work: Callable[[Communicator], Result]) -> list[Result]:
    """What came of it on each."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(size) as threads:

        def join(rank: int) -> Result:
            group = ProcessGroup(rank, size)
            group.join(Path(folder) / "store")
            return work(group)

        return list(threads.map(join, range(size)))
