"""A cache with checksums in place of keys and values, to check what a model would read."""

import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from legato.core.plan import FIRST_STATE, STATES, ZERO_STATE, BlockMove, ScheduledChunk
from legato.kv.prefix_node import Node

_SPOILED = -1
"""The checksum of no tokens."""


class ShadowCache:
    """The checksums of what blocks, host memory and states hold.

    Token ids are those of a request, prompt and output so far; a salt is its `cache_salt`.
    """

    def __init__(self, block_size: int, *, has_states: bool) -> None:
        self._block_size = block_size
        self._has_states = has_states
        self._blocks: dict[tuple[int, int], int | None] = {}
        """Key (block, offset), value a checksum of the token there and of all before it."""
        self._host: dict[int, list[int | None]] = {}
        """Key slot, value the same of the tokens of the block that was copied there."""
        self._states: dict[int, int | None] = {}
        """Key slot, value a checksum of the tokens that its state has seen."""
        self._host_states: dict[int, int | None] = {}

    def read(self, chunk: ScheduledChunk, token_ids: Sequence[int], salt: str | None) -> None:
        """What a model would read: all tokens before the chunk, each after those before it."""
        for position, fingerprint in enumerate(_fingerprints(token_ids[: chunk.start], salt)):
            there = self._blocks.get(self._slot(chunk.block_ids, position))
            assert there == fingerprint, "reads what is not there"
        if chunk.state is None:
            assert not self._has_states
        elif chunk.state.source == ZERO_STATE:
            assert not chunk.start
        else:
            seen = _checksum(token_ids[: chunk.start])
            assert self._states[chunk.state.source] == seen, "reads another state"

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
        for position, fingerprint in enumerate(_fingerprints(token_ids, salt)):
            if position >= start:
                self._blocks[self._slot(block_ids, position)] = fingerprint

    def check(self, block_ids: Sequence[int], token_ids: Sequence[int], salt: str | None) -> None:
        """What another engine would read."""
        for position, fingerprint in enumerate(_fingerprints(token_ids, salt)):
            assert self._blocks[self._slot(block_ids, position)] == fingerprint

    def spoil(self, chunk: ScheduledChunk) -> None:
        """What an attempt that fails may leave behind."""
        for position in range(chunk.start, chunk.end):
            self._blocks[self._slot(chunk.block_ids, position)] = _SPOILED
        for _, slot in _kept_states(chunk):
            self._states[slot] = None

    def overwrite(self, block_ids: Sequence[int]) -> None:
        """What a transfer may still do whose request has ended."""
        for block_id, offset in product(block_ids, range(self._block_size)):
            self._blocks[block_id, offset] = _SPOILED

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks and states to and from the host."""
        for move in moves:
            if move.group == STATES:
                if move.to_host:
                    self._host_states[move.slot] = self._states[move.block_id]
                else:
                    self._states[move.block_id] = self._host_states[move.slot]
                continue
            slots = [(move.block_id, offset) for offset in range(self._block_size)]
            if move.to_host:
                self._host[move.slot] = [self._blocks.get(slot) for slot in slots]
            else:
                self._blocks.update(zip(slots, self._host[move.slot], strict=True))

    def check_shared(self, root: Node, kept: Mapping[int, int]) -> None:
        """All that the prefix tree has for computed is, with the tokens that it has there.

        Args:
            kept: slots of states that are kept; key that of the block at whose end they are.
        """
        for node in root.children.values():
            num_bytes = len(node.tokens[: self._block_size].tobytes())
            salt = node.key[: -num_bytes - 1].decode() if node.is_salted else None
            self._check_node(node, zlib.crc32(str(salt).encode()), [], kept)

    def _check_node(
        self, node: Node, fingerprint: int, before: list[int], kept: Mapping[int, int]
    ) -> None:
        size = self._block_size
        tokens = [*before, *node.tokens]
        for i, token_id in enumerate(node.tokens):
            fingerprint = zlib.crc32(token_id.to_bytes(8, "little"), fingerprint)
            place, offset = node.places[i // size], i % size
            if node.is_spilled:
                there = self._host[place][offset]
            else:
                there = self._blocks.get((place, offset))
            assert there == fingerprint or i >= len(node.tokens) - node.num_missing
        for i, key in enumerate(node.block_keys(), 1):
            if key in kept:
                seen = _checksum(tokens[: node.start + i * size])
                assert self._states[kept[key]] == seen, "the state of another beginning"
        for child in node.children.values():
            self._check_node(child, fingerprint, tokens, kept)

    def _slot(self, block_ids: Sequence[int], position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._block_size)
        return block_ids[index], offset


def _kept_states(chunk: ScheduledChunk) -> list[tuple[int, int]]:
    """The positions up to which states are written, and their slots."""
    if chunk.state is None:
        return []
    if not chunk.state.earlier:
        return [(chunk.end, chunk.state.destination)]
    slots = *chunk.state.earlier, chunk.state.destination
    return list(zip(range(chunk.start + 1, chunk.end + 1), slots, strict=False))


def _fingerprints(token_ids: Sequence[int], salt: str | None) -> Iterator[int]:
    """Yield a checksum of each token and all before it."""
    fingerprint = zlib.crc32(str(salt).encode())
    for token_id in token_ids:
        fingerprint = zlib.crc32(token_id.to_bytes(8, "little"), fingerprint)
        yield fingerprint


def _checksum(token_ids: Sequence[int]) -> int:
    return zlib.crc32(array("q", token_ids).tobytes())
