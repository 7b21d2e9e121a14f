"""Blocks of a prompt that stay where they are, whatever becomes of its request."""

import hashlib

import msgspec

from legato.core.block_ids import BlockIds
from legato.core.kv_transfer import FetchBlocks, KVTransfer
from legato.core.request import AddRequest, Request
from legato.kv.prefix_node import Node


class Hold:
    """Keeps the shared blocks of a prompt for an engine that reads them, or writes to them.

        [0, start)            in the cache before, or computed here
        [start, num_arrived)  written by the transfer
        [num_arrived, end)    on their way

    What is computed here alone has `start` at its end.

    Args:
        last: the node that the last of the blocks is in.
        block_ids: all of them, in token order.
        block_size: tokens of each.
        start: tokens that were found in the cache, computed or not.

    Attributes:
        request_id: whose blocks they are.
        transfer: what it asked for.
        prompt_digest: of all that keys and values of its blocks depend on: what another engine
            computed of another prompt is no use.
        num_arrived: tokens at its start, as the transfer has told.
        is_over: nothing more will arrive.
    """

    __slots__ = (
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
        self.num_arrived = self.start
        self.is_over = False

    @property
    def end(self) -> int:
        """Tokens in its blocks."""
        return len(self.block_ids) * self.block_size

    @property
    def num_computed_tokens(self) -> int:
        """Those at its start that whoever reads the blocks finds there."""
        return self.last.num_computed_tokens

    @property
    def is_settled(self) -> bool:
        """Whether all that has arrived counts as computed."""
        return self.num_computed_tokens >= self.num_arrived

    def blocks(self, start: int, end: int | None = None) -> BlockIds:
        """Of tokens [start, end), which are whole blocks."""
        size = self.block_size
        return self.block_ids[start // size : None if end is None else end // size]


def prompt_digest(message: AddRequest) -> bytes:
    """A digest of the prompt and its salt, where "None" is a salt like any other."""
    digest = hashlib.sha256(message.prompt_token_ids.tobytes())
    digest.update(msgspec.msgpack.encode(message.service.cache_salt))
    return digest.digest()
