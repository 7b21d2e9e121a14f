"""Where in a row of tokens its last few stood before."""

from array import array
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from legato.core.token_ids import TokenIds

LENGTHS = (4, 2, 1)
"""Tokens that are looked up at once, the longest first."""
_LONGEST = LENGTHS[0]
_MOST_COMPARED = 32
"""Tokens up to which it is found out how long a match is."""
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
"""Odd numbers of 64 bits without a pattern; hashing by multiplication and the highest bits, as in
Knuth, The Art of Computer Programming, vol. 3, 6.4."""
_WORD = 2**64 - 1
_LEAST_BITS = 8


class Place(NamedTuple):
    """What came next where some tokens stood before.

    Attributes:
        at: where in the row that next token is.
        length: of the tokens before it, those that are the same; `_MOST_COMPARED` for more.
    """

    at: int
    length: int


class SuffixIndex:
    """The last place of each run of 1, 2 and 4 tokens in a row that grows.

    A run's hash is where its place is kept: where two meet, the later one is, so that memory is 24
    to 48 bytes a token whatever the tokens are, and a token costs the same however many there are.

    Args:
        token_ids: the row, which others append to.

    Attributes:
        num_indexed: tokens up to which the runs before them were taken in.
    """

    def __init__(self, token_ids: TokenIds) -> None:
        self.token_ids = token_ids
        self.num_indexed = 0
        self._bits = 0
        self._tables: dict[int, array[int]] = {}  # key the length, value places by hash

    def extend(self, end: int) -> None:
        """Take in the runs before each token up to `end`."""
        if 2 * end > 1 << self._bits:
            self._bits = max(_LEAST_BITS, len(self.token_ids).bit_length() + 1)
            self._tables = {length: array("i", bytes(4 << self._bits)) for length in LENGTHS}
            self.num_indexed = 0
        if end - self.num_indexed > _LONGEST:
            self._add_many(self.num_indexed, end)
        else:
            for at in range(self.num_indexed, end):
                self._add(at)
        self.num_indexed = max(end, self.num_indexed)

    def find(self, token_ids: TokenIds, end: int) -> Place | None:
        """Where the tokens before `end` of a row, this one or another, stood last.

        The longest run of `LENGTHS` that did is taken.
        """
        shift, own = 64 - self._bits, self.token_ids
        if not self._bits:
            return None
        for length in LENGTHS:
            if end < length:
                continue
            run = token_ids[end - length : end]
            at = self._tables[length][_hash(run) >> shift]
            if at and own[at - length : at] == run:
                return Place(at, self._common(token_ids, end, at, length))
        return None

    def _common(self, token_ids: TokenIds, end: int, at: int, length: int) -> int:
        """How many tokens are the same before `end` and before `at`, where `length` are."""
        own, most = self.token_ids, min(_MOST_COMPARED, at, end)
        while length < most and own[at - length - 1] == token_ids[end - length - 1]:
            length += 1
        return length

    def _add(self, at: int) -> None:
        shift, row = 64 - self._bits, self.token_ids
        for length, table in self._tables.items():
            if at >= length:
                table[_hash(row[at - length : at]) >> shift] = at

    def _add_many(self, start: int, end: int) -> None:
        shift = np.uint64(64 - self._bits)
        first = max(0, start - _LONGEST)
        row = np.array(self.token_ids[first:end], dtype=np.int64).astype(np.uint64)
        for length, table in self._tables.items():
            begin = max(start, length)
            if begin < end:
                places = np.arange(begin, end, dtype=np.int32)
                hashes = _hashes(row, begin - first, length) >> shift
                np.frombuffer(table, dtype=np.int32)[hashes] = places  # of equals, the last stays


def _hash(run: TokenIds) -> int:
    total = 0
    for token_id, multiplier in zip(run, _MULTIPLIERS, strict=False):
        total += token_id * multiplier
    return total & _WORD


def _hashes(row: npt.NDArray[np.uint64], begin: int, length: int) -> npt.NDArray[np.uint64]:
    """`_hash` of the runs of `length` before each token from `begin` on."""
    hashes = np.zeros(len(row) - begin, dtype=np.uint64)
    for place, multiplier in zip(range(begin - length, begin), _MULTIPLIERS, strict=False):
        hashes += row[place : place + len(hashes)] * np.uint64(multiplier)
    return hashes
