"""Indexes which replicas have which blocks cached, by their reports."""

from collections.abc import Iterable, Sequence

from legato.core.block_hash import BlockHash


class PrefixIndex:
    """Follows the replicas' cache events, and the prompts sent to them in the meantime.

    A hash stands for a block and all blocks before it, so no tree is needed: a replica with a block
    has the blocks before it, or will not use it. A replica whose model has recurrent layers or
    sliding windows uses them up to an end (`HitEnds`). A prompt sent there may end anywhere: while
    it runs, the replica has what the next prompt needs where the two part.
    """

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}  # key replica, value its bit
        # Key a block, value the bits of the replicas that have it, or that will have it.
        self._holders: dict[BlockHash, int] = {}
        self._expected: dict[BlockHash, int] = {}
        self._with_ends = 0  # bits of replicas with ends
        # Key a block, values the bits of these replicas that have an end there.
        self._ends: dict[BlockHash, int] = {}

    def __len__(self) -> int:
        """Number of different blocks known."""
        return len(self._holders.keys() | self._expected.keys())

    def expect(self, replica_id: str, hashes: Iterable[BlockHash]) -> None:
        """Expect blocks of a prompt sent to a replica, so that the next request can share them."""
        _add(self._expected, hashes, self._bit(replica_id))

    def expect_no_longer(self, replica_id: str, hashes: Iterable[BlockHash]) -> None:
        """Drop expected blocks of an ended request: the replica has reported the ones it has."""
        _drop(self._expected, hashes, self._bits.get(replica_id, 0))

    def store(self, replica_id: str, hashes: Iterable[BlockHash]) -> None:
        """Record that a replica has these blocks."""
        _add(self._holders, hashes, self._bit(replica_id))

    def remove(self, replica_id: str, hashes: Iterable[BlockHash]) -> None:
        """Record that a replica has dropped these blocks; blocks it never had are ignored."""
        _drop(self._holders, hashes, self._bits.get(replica_id, 0))

    def change_ends(
        self, replica_id: str, added: Iterable[BlockHash], removed: Iterable[BlockHash]
    ) -> None:
        """Record after which blocks hits of a replica end; from now on, they end nowhere else."""
        bit = self._bit(replica_id)
        self._with_ends |= bit
        _add(self._ends, added, bit)
        _drop(self._ends, removed, bit)

    def clear(self, replica_id: str) -> None:
        """Forget all blocks of a replica, cached and expected."""
        bit = self._bits.pop(replica_id, 0)
        self._with_ends &= ~bit
        for known in (self._holders, self._expected, self._ends):
            _drop(known, [one for one, bits in known.items() if bits & bit], bit)

    def num_cached_blocks(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """Return how many first blocks of a prompt each replica can use, if it can use any.

        Args:
            hashes: of the prompt's blocks, from the first one on.
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
        """Return (number of blocks, bits of the replicas that can use so many), the longest first.

        There is an entry for each number at which replicas drop out, or have an end.
        """
        found: list[tuple[int, int]] = []
        have, expect, ends = self._holders, self._expected, self._ends
        holders, usable = -1, 0  # bits
        for length, block_hash in enumerate(hashes):
            expected = expect.get(block_hash, 0)
            still = holders & (have.get(block_hash, 0) | expected)
            if still != holders and usable:
                found.append((length, usable))
            holders = still
            if not holders:
                return found[::-1]
            usable = holders
            if self._with_ends & holders:
                usable &= ~self._with_ends | expected | ends.get(block_hash, 0)
                if usable & self._with_ends:
                    found.append((length + 1, usable))
        return [(len(hashes), usable), *found[::-1]] if hashes else []

    def _bit(self, replica_id: str) -> int:
        bit = self._bits.get(replica_id)
        if bit is None:
            taken = sum(self._bits.values())
            bit = self._bits[replica_id] = ~taken & (taken + 1)  # the lowest free bit
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
