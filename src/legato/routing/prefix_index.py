"""Which replicas have which blocks cached, as far as they have told."""

from collections.abc import Iterable, Sequence

from legato.core.block_hash import BlockHash


class PrefixIndex:
    """Follows the cache events of replicas, and what has been sent to them meanwhile.

    A hash stands for a block and all before it, so that no tree is needed: a replica that has a
    block has those before it, or will not use it.
    """

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}  # key replica, value 1 << its place
        # Key a block, values the bits of those that have it, and that are about to.
        self._holders: dict[BlockHash, int] = {}
        self._expected: dict[BlockHash, int] = {}

    def __len__(self) -> int:
        """Different blocks that are known."""
        return len(self._holders.keys() | self._expected.keys())

    def expect(self, replica_id: str, hashes: Iterable[BlockHash]) -> None:
        """A prompt with these has been sent there, so that the next one would share them."""
        _add(self._expected, hashes, self._bit(replica_id))

    def expect_no_longer(self, replica_id: str, hashes: Iterable[BlockHash]) -> None:
        """The request has ended: what there is of it has been told."""
        _drop(self._expected, hashes, self._bits.get(replica_id, 0))

    def store(self, replica_id: str, hashes: Iterable[BlockHash]) -> None:
        """A replica has come to have these."""
        _add(self._holders, hashes, self._bit(replica_id))

    def remove(self, replica_id: str, hashes: Iterable[BlockHash]) -> None:
        """A replica has these no longer; those that it never had are ignored."""
        _drop(self._holders, hashes, self._bits.get(replica_id, 0))

    def clear(self, replica_id: str) -> None:
        """A replica has nothing any more, and nothing is about to come."""
        bit = self._bits.pop(replica_id, 0)
        for known in (self._holders, self._expected):
            _drop(known, [one for one, bits in known.items() if bits & bit], bit)

    def num_cached_blocks(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """How many of a prompt's first blocks each replica has; those that have none are left out.

        Args:
            hashes: of the prompt, from its first block on.
        """
        lengths = self._lengths(hashes)
        if not lengths:
            return {}
        return {
            replica_id: length
            for replica_id, bit in self._bits.items()
            if (length := next((n for n, bits in lengths if bits & bit), 0))
        }

    def _lengths(self, hashes: Sequence[BlockHash]) -> list[tuple[int, int]]:
        """At which numbers of blocks replicas drop out, and the bits of those that came so far.

        The longest comes first.
        """
        found: list[tuple[int, int]] = []
        have, expect = self._holders, self._expected
        holders = -1  # all bits
        for length, block_hash in enumerate(hashes):
            still = holders & (have.get(block_hash, 0) | expect.get(block_hash, 0))
            if still != holders and length:
                found.append((length, holders))
            holders = still
            if not holders:
                return found[::-1]
        return [(len(hashes), holders), *found[::-1]] if hashes else []

    def _bit(self, replica_id: str) -> int:
        bit = self._bits.get(replica_id)
        if bit is None:
            taken = sum(self._bits.values())
            bit = self._bits[replica_id] = ~taken & (taken + 1)  # the lowest that is free
        return bit


def _add(known: dict[BlockHash, int], hashes: Iterable[BlockHash], bit: int) -> None:
    for block_hash in hashes:
        known[block_hash] = known.get(block_hash, 0) | bit


def _drop(known: dict[BlockHash, int], hashes: Iterable[BlockHash], bit: int) -> None:
    for block_hash in hashes:
        left = known.get(block_hash, 0) & ~bit
        if left:
            known[block_hash] = left
        else:
            known.pop(block_hash, None)
