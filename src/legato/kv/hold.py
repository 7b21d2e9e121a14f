"""Holds, which keep a prompt's blocks even after its request."""

import hashlib

import msgspec

from legato.core.kv_transfer import FetchBlocks, KVTransfer
from legato.core.request import AddRequest, Request
from legato.kv.block_ids import BlockIds
from legato.kv.prefix_node import Node


class Hold:
    """Keeps the shared blocks of a prompt for an engine that reads them, or writes to them.

        [0, start)            in the cache before, or computed here
        [start, num_arrived)  written by the transfer
        [num_arrived, end)    still to arrive

    A prompt that is computed here alone has `start` at its end.

    Args:
        last: node of the last block, also an attribute.
        block_ids: all blocks, in token order.
        block_size: tokens of each block.
        start: tokens that were found in the cache, computed or not.

    Attributes:
        request_id: the request that the blocks belong to.
        transfer: the transfer that the request asked for.
        base: the node above the one with its first missing token, however nodes are split.
        prompt_digest: digest of everything that the keys and values depend on: another engine's
            blocks of another prompt are no use.
        num_arrived: tokens at its start that have arrived, as the transfer reported.
        is_over: nothing more will arrive.
    """

    __slots__ = (
        "base",
        "block_ids",
        "block_size",
        "is_over",
        "last",
        "num_arrived",
        "prompt_digest",
        "request_id",
        "start",
        "transfer",
    )

    def __init__(
        self, request: Request, last: Node, block_ids: BlockIds, *, block_size: int, start: int
    ) -> None:
        assert request.message.kv_transfer is not None
        self.request_id = request.request_id
        self.transfer: KVTransfer = request.message.kv_transfer
        self.prompt_digest = prompt_digest(request.message)
        self.last = last
        self.block_ids = block_ids
        self.block_size = block_size
        self.start = start if isinstance(self.transfer, FetchBlocks) else self.end
        self.base = last
        while self.base.end > self.start:
            assert self.base.parent is not None
            self.base = self.base.parent
        self.num_arrived = self.start
        self.is_over = False

    @property
    def end(self) -> int:
        """Tokens in its blocks."""
        return len(self.block_ids) * self.block_size

    @property
    def num_computed_tokens(self) -> int:
        """Computed tokens at its start, which a reader of the blocks finds there."""
        return self.last.num_computed_tokens

    @property
    def is_settled(self) -> bool:
        """Whether all arrived tokens count as computed."""
        return self.num_computed_tokens >= self.num_arrived

    def blocks(self, start: int, end: int | None = None) -> BlockIds:
        """Return the blocks of tokens [start, end), which must be whole blocks."""
        size = self.block_size
        return self.block_ids[start // size : None if end is None else end // size]


def prompt_digest(message: AddRequest) -> bytes:
    """Return a digest of the prompt and its salt; no salt differs from the salt "None"."""
    digest = hashlib.sha256(message.prompt_token_ids.tobytes())
    digest.update(msgspec.msgpack.encode(message.service.prompt_salt))
    return digest.digest()
