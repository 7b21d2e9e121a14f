"""The interface for copying memory between processes."""

from typing import Literal, Protocol

from legato.transfer.block_memory import Spans

ReadState = Literal["running", "done", "failed"]


class TransferError(Exception):
    """Another engine's memory cannot be read: the engine is gone, or is not the expected one."""


class StuckReadError(TransferError):
    """A copy can be neither ended nor stopped: it may write at any time.

    Args:
        read: the copy.
    """

    def __init__(self, read: "Read") -> None:
        super().__init__("a read of the other engine can be neither ended nor stopped")
        self.read = read


class Read(Protocol):
    """A copy in progress."""

    def state(self) -> ReadState: ...

    def cancel(self) -> bool:
        """Stop the copy; return whether nothing will be written any more."""
        ...


class Mover(Protocol):
    """Reads memory that another mover has registered. All calls come from one thread.

    Attributes:
        metadata: what other movers need to read the memory registered here.
    """

    @property
    def metadata(self) -> bytes: ...

    def connect(self, metadata: bytes) -> str:
        """Connect to another mover; return its name. Raises `TransferError`."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget another mover that failed or is gone."""
        ...

    def read(self, peer: str, spans: Spans, gpu: int | None) -> Read:
        """Start copying a peer's memory here. Raises `TransferError`.

        Args:
            gpu: as in the peer's `CacheMemory`.
        """
        ...

    def progress(self) -> None:
        """Advance other movers' reads of this memory; called often while there may be any."""
        ...

    def close(self) -> None: ...
