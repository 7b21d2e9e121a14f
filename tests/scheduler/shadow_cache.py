"""A cache with checksums in place of keys and values, to check what a model would read."""

import zlib
from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from legato.core.plan import FIRST_STATE, STATES, ZERO_STATE, BlockMove, ScheduledChunk
from legato.kv.prefix_node import Node

Checksums = npt.NDArray[np.uint64]

_UNWRITTEN, _SPOILED = 0, 1
"""The checksums of no tokens."""
_MOST_TOKENS = 2**17
_FACTORS = np.random.default_rng(0).integers(1, 2**64, 1 + _MOST_TOKENS, np.uint64) | np.uint64(1)


class ShadowCache:
    """The checksums of what blocks, host memory and states hold.

    Token ids are those of a request, prompt and output so far; a salt is its `cache_salt`.
    """

    def __init__(self, block_size: int, *, has_states: bool) -> None:
        self._block_size = block_size
        self._has_states = has_states
        self._blocks: Checksums = np.full((1, block_size), _UNWRITTEN, np.uint64)
        """[block, offset]: a checksum of the token there and of all before it."""
        self._host: dict[int, Checksums] = {}
        """Key slot, value the same of the tokens of the block that was copied there."""
        self._states: dict[int, int | None] = {}
        """Key slot, value a checksum of the tokens that its state has seen."""
        self._host_states: dict[int, int | None] = {}

    def read(self, chunk: ScheduledChunk, token_ids: Sequence[int], salt: str | None) -> None:
        """What a model would read: all tokens before the chunk, each after those before it."""
        before = token_ids[: chunk.start]
        self.check(chunk.block_ids, before, salt)
        if chunk.state is None:
            assert not self._has_states
        elif chunk.state.source == ZERO_STATE:
            assert not chunk.start
        else:
            assert self._states[chunk.state.source] == _checksum(before), "reads another state"

    def write(self, chunk: ScheduledChunk, token_ids: Sequence[int], salt: str | None) -> None:
        """What a model would write.

        Args:
            token_ids: with the chunk's drafts.
        """
        self.fill(chunk.block_ids, chunk.start, token_ids[: chunk.end], salt)
        if chunk.state is not None:
            for end, slot in _kept_states(chunk):
                assert slot >= FIRST_STATE
                self._states[slot] = _checksum(token_ids[:end])

    def fill(
        self, block_ids: Sequence[int], start: int, token_ids: Sequence[int], salt: str | None
    ) -> None:
        """Write the tokens from `start` on."""
        self._put(block_ids, start, _checksums(token_ids, salt)[start:])

    def check(self, block_ids: Sequence[int], token_ids: Sequence[int], salt: str | None) -> None:
        """What another engine would read."""
        ids = self._reserved(block_ids, 0, len(token_ids))
        there = self._blocks[ids].ravel()[: len(token_ids)]
        assert np.array_equal(there, _checksums(token_ids, salt)), "reads what is not there"

    def spoil(self, chunk: ScheduledChunk) -> None:
        """What an attempt that fails may leave behind."""
        spoiled = np.full(chunk.end - chunk.start, _SPOILED, np.uint64)
        self._put(chunk.block_ids, chunk.start, spoiled)
        for _, slot in _kept_states(chunk):
            self._states[slot] = None

    def overwrite(self, block_ids: Sequence[int]) -> None:
        """What a transfer may still do whose request has ended."""
        for block_id in block_ids:
            self._block(block_id)[:] = _SPOILED

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks and states to and from the host."""
        for move in moves:
            if move.group == STATES:
                if move.to_host:
                    self._host_states[move.slot] = self._states[move.block_id]
                else:
                    self._states[move.block_id] = self._host_states[move.slot]
                continue
            if move.to_host:
                self._host[move.slot] = self._block(move.block_id).copy()
            else:
                self._block(move.block_id)[:] = self._host[move.slot]

    def check_shared(self, root: Node, kept: Mapping[int, int]) -> None:
        """All that the prefix tree has for computed is, with the tokens that it has there.

        Args:
            kept: slots of states that are kept; key that of the block at whose end they are.
        """
        for node in root.children.values():
            salt = None if node.salt is None else node.salt.decode()
            self._check_node(node, salt, [], kept)

    def _check_node(
        self, node: Node, salt: str | None, before: list[int], kept: Mapping[int, int]
    ) -> None:
        size = self._block_size
        tokens = [*before, *node.tokens]
        expected = _checksums(tokens, salt)[len(before) : len(tokens) - node.num_missing]
        find = self._host.__getitem__ if node.is_spilled else self._block
        there = [find(place) for place in node.places[: -(-len(expected) // size)]]
        if there:
            assert np.array_equal(np.concatenate(there)[: len(expected)], expected)
        for i, key in enumerate(node.block_keys(), 1):
            if key in kept:
                seen = _checksum(tokens[: node.start + i * size])
                assert self._states[kept[key]] == seen, "the state of another beginning"
        for child in node.children.values():
            self._check_node(child, salt, tokens, kept)

    def _put(self, block_ids: Sequence[int], start: int, values: Checksums) -> None:
        """Write checksums from a position on."""
        ids = self._reserved(block_ids, start, start + len(values))
        blocks = self._blocks[ids]
        first = start % self._block_size
        blocks.ravel()[first : first + len(values)] = values
        self._blocks[ids] = blocks

    def _reserved(self, block_ids: Sequence[int], start: int, end: int) -> list[int]:
        """Return the blocks of some positions, and have room for them."""
        ids = [*block_ids[start // self._block_size : -(-end // self._block_size)]]
        self._block(max(ids, default=0))
        return ids

    def _block(self, block_id: int) -> Checksums:
        if block_id >= len(self._blocks):
            more = np.full((1 + block_id, self._block_size), _UNWRITTEN, np.uint64)
            self._blocks = np.concatenate([self._blocks, more])
        block: Checksums = self._blocks[block_id]
        return block


def _kept_states(chunk: ScheduledChunk) -> list[tuple[int, int]]:
    """The positions up to which states are written, and their slots."""
    if chunk.state is None:
        return []
    if not chunk.state.earlier:
        return [(chunk.end, chunk.state.destination)]
    slots = *chunk.state.earlier, chunk.state.destination
    return list(zip(range(chunk.start + 1, chunk.end + 1), slots, strict=False))


def _checksums(token_ids: Sequence[int], salt: str | None) -> Checksums:
    """Return a checksum of each token and all before it."""
    numbers = [zlib.crc32(str(salt).encode()), *token_ids]
    terms = (np.array(numbers, np.uint64) + np.uint64(1)) * _FACTORS[: len(numbers)]
    return np.cumsum(terms)[1:]


def _checksum(token_ids: Sequence[int]) -> int:
    return zlib.crc32(array("q", token_ids).tobytes())
