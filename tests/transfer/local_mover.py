"""Copies memory between two engines in one process, as `NixlMover` does between two."""

import ctypes

from legato.transfer.block_memory import CacheMemory, Spans
from legato.transfer.mover import ReadState, TransferError

_known: dict[bytes, CacheMemory] = {}
"""Key the metadata of a mover that is not closed, value its memory."""


class LocalMover:
    """Reads the memory of another mover in the same process.

    Args:
        name: of this mover.
        memory: that other movers may read, in host memory.
    """

    def __init__(self, name: str, memory: CacheMemory) -> None:
        assert memory.gpu is None, "reading there would end the process"
        self.metadata = name.encode()
        _known[self.metadata] = memory

    def connect(self, metadata: bytes) -> str:
        if metadata not in _known:
            raise TransferError("there is no such engine in this process")
        return metadata.decode()

    def disconnect(self, peer: str) -> None:
        """Do nothing: there is no state of peers."""

    def read(self, peer: str, spans: Spans, gpu: int | None) -> "LocalRead":  # noqa: ARG002
        memory = _known.get(peer.encode())
        if memory is None:
            raise TransferError("the other engine is gone")
        for here, there, num_bytes in spans.tolist():
            if not any(
                0 <= there - region.address <= region.num_bytes - num_bytes
                for region in memory.regions
            ):
                raise TransferError("outside of the other engine's memory")
            ctypes.memmove(here, there, num_bytes)
        return LocalRead()

    def progress(self) -> None:
        """Do nothing: copies are complete at once."""

    def close(self) -> None:
        _known.pop(self.metadata, None)


class LocalRead:
    """A copy that is complete."""

    def state(self) -> ReadState:
        return "done"

    def cancel(self) -> bool:
        return True
