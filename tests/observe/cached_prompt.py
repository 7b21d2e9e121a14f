"""A prompt of three blocks, and the events of a cache that has them."""

from legato.core.block_hash import block_hashes
from legato.core.kv_events import BlockStored, Medium

SIZE = 4
PROMPT = list(range(300, 312))
NAMES = block_hashes(PROMPT, SIZE)


def stored(first: int = 0, last: int = 3, medium: Medium = "GPU") -> BlockStored:
    """The event of blocks `first` to `last` of the prompt."""
    return BlockStored(
        block_hashes=NAMES[first:last],
        parent_block_hash=NAMES[first - 1] if first else None,
        token_ids=PROMPT[first * SIZE : last * SIZE],
        block_size=SIZE,
        medium=medium,
    )
