"""How much of a cache's memory its window groups need, at worst."""

from collections.abc import Sequence
from dataclasses import dataclass

from legato.core.errors import ConfigError


@dataclass(frozen=True)
class WindowNeed:
    """The most blocks that a window group needs.

    A request needs the blocks that its window reaches, one that the window has begun to leave, and
    one that its next tokens begin. The rows of the steps in flight fill further blocks.

    Attributes:
        window: keys visible to a query.
        block_bytes: size of a block in all layers of the group.
        per_request: blocks of each request that has any.
        per_step: further blocks, for the rows of all steps in flight.
    """

    window: int
    block_bytes: int
    per_request: int
    per_step: int

    @classmethod
    def of(
        cls, window: int, *, block_bytes: int, block_size: int, rows_in_flight: int
    ) -> "WindowNeed":
        """Return the need of a group.

        Args:
            rows_in_flight: most rows of all steps in flight.
        """
        return cls(
            window,
            block_bytes,
            per_request=-(-(window - 1) // block_size) + 2,
            per_step=-(-rows_in_flight // block_size),
        )

    def num_blocks(self, num_requests: int) -> int:
        """Return the blocks that so many requests need."""
        return num_requests * self.per_request + self.per_step


def num_windowed_requests(
    needs: Sequence[WindowNeed], memory_bytes: int, *, request_bytes: int, most: int
) -> int:
    """Return for how many requests the window groups have blocks, `most` if possible.

    They get half of the memory at most, since the blocks of all other tokens need the rest.

    Args:
        request_bytes: of the longest request in the group that keeps all tokens; as much is left.

    Raises:
        ConfigError: the longest request does not fit alone.
    """
    first_bytes = window_bytes(needs, 1)
    if first_bytes + request_bytes > memory_bytes:
        raise ConfigError(
            f"one request of max_model_len tokens needs {first_bytes + request_bytes:,} bytes of "
            f"KV cache, {first_bytes:,} of them in layers with a sliding window, but it has "
            f"{memory_bytes:,}: raise --kv-cache-memory or lower --max-model-len"
        )
    room = min(memory_bytes // 2, memory_bytes - request_bytes) - first_bytes
    more = max(0, room) // (window_bytes(needs, 2) - first_bytes)
    return min(most, 1 + more)


def window_bytes(needs: Sequence[WindowNeed], num_requests: int) -> int:
    """Return the size of all window groups for so many requests."""
    return sum(need.block_bytes * need.num_blocks(num_requests) for need in needs)
