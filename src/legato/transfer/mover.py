"""What copies memory from one process to another."""

from typing import Literal, Protocol

from legato.transfer.memory import Spans

ReadState = Literal["running", "done", "failed"]


class TransferError(Exception):
    """Another engine cannot be read from: it is gone, or not what is wanted."""


class StuckReadError(TransferError):
    """A copy neither ends nor can be stopped: it may write at any time.

    Args:
        read: the copy.
    """

    def __init__(self, read: "Read") -> None:
        super().__init__("a read of the other engine can be neither ended nor stopped")
        self.read = read


class Read(Protocol):
    """A copy that has begun."""

    def state(self) -> ReadState: ...

    def cancel(self) -> bool:
        """Give it up; whether nothing will be written any more."""
        ...


class Mover(Protocol):
    """Reads memory that another mover has made known; called from one thread.

    Attributes:
        metadata: what others have to know to read the memory that this one makes known.
    """

    @property
    def metadata(self) -> bytes: ...

    def connect(self, metadata: bytes) -> str:
        """Get to know another mover; returns its name. Raises `TransferError`."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget another one, which fails or is gone."""
        ...

    def read(self, peer: str, spans: Spans, gpu: int | None) -> Read:
        """Begin to copy its memory here; raises `TransferError`.

        Args:
            gpu: as of the `CacheMemory` there.
        """
        ...

    def progress(self) -> None:
        """Have others' reads of this memory go on; called often while there may be any."""
        ...

    def close(self) -> None: ...
