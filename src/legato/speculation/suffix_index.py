"""Finds where the last tokens of a row occurred before."""

from array import array
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from legato.core.token_ids import TokenIds

LENGTHS = (1, 2, 4)
"""Lengths of the runs that are looked up."""
_LONGEST = LENGTHS[-1]
_MOST_COMPARED = 32
"""Most tokens that are compared to measure a match."""
_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
"""Odd numbers of 32 bits without a pattern; hashing by multiplication and the highest bits, as in
Knuth, The Art of Computer Programming, vol. 3, 6.4. The last token has the first multiplier, so the
sum of a longer run begins with that of a shorter one."""
_WORD_BITS = 32
_WORD = 2**_WORD_BITS - 1
_LEAST_BITS = 8


class Place(NamedTuple):
    """An earlier occurrence of some tokens.

    Attributes:
        at: index in the row of the token that follows them.
        length: number of equal tokens before it; `_MOST_COMPARED` for more.
    """

    at: int
    length: int


class SuffixIndex:
    """The last place of each run of 1, 2 and 4 tokens in a growing row.

    A table has a run's place at the run's hash; of runs with equal hashes it keeps the later one.
    So memory is 24 to 48 bytes a token for any tokens, and the time for a token does not
    grow with the row.

    Args:
        token_ids: the row, which the caller appends to.

    Attributes:
        num_indexed: tokens up to which the runs before them are in the index.
    """

    def __init__(self, token_ids: TokenIds) -> None:
        self.token_ids = token_ids
        self.num_indexed = 0
        self._bits = 0
        self._tables: tuple[array[int], ...] = ()  # for each length, places by hash

    def extend(self, end: int) -> None:
        """Index the runs before each token up to `end`."""
        if 2 * end > 1 << self._bits:
            self._bits = max(_LEAST_BITS, len(self.token_ids).bit_length() + 1)
            self._tables = tuple(array("i", bytes(4 << self._bits)) for _ in LENGTHS)
            self.num_indexed = 0
        if end - self.num_indexed > _LONGEST:
            self._add_many(self.num_indexed, end)
        else:
            for at in range(self.num_indexed, end):
                self._add(at)
        self.num_indexed = max(end, self.num_indexed)

    def find(self, token_ids: TokenIds, end: int) -> Place | None:
        """Find the last occurrence of the tokens before `end` of this row or another.

        The longest run of `LENGTHS` that occurs is taken.
        """
        if not self._bits:
            return None
        own = self.token_ids
        runs = [*zip(LENGTHS, self._tables, self._slots(token_ids, end), strict=True)]
        for length, table, slot in reversed(runs):
            at = table[slot] if end >= length else 0
            if at and own[at - length : at] == token_ids[end - length : end]:
                return Place(at, self._common(token_ids, end, at, length))
        return None

    def _common(self, token_ids: TokenIds, end: int, at: int, length: int) -> int:
        """Return how many tokens before `end` and before `at` are equal; at least `length` are."""
        own, most = self.token_ids, min(_MOST_COMPARED, at, end)
        while length < most and own[at - length - 1] == token_ids[end - length - 1]:
            length += 1
        return length

    def _add(self, at: int) -> None:
        slots = self._slots(self.token_ids, at)
        for length, table, slot in zip(LENGTHS, self._tables, slots, strict=True):
            if at >= length:
                table[slot] = at

    def _slots(self, token_ids: TokenIds, end: int) -> tuple[int, int, int]:
        """Return the table slots of the runs before `end`, in order of `LENGTHS`.

        The slot of a run that would begin before the row has no meaning.
        """
        a, b, c, d = token_ids[end - _LONGEST : end] if end >= _LONGEST else _short(token_ids, end)
        one = d * _MULTIPLIERS[0]
        two = one + c * _MULTIPLIERS[1]
        four = two + b * _MULTIPLIERS[2] + a * _MULTIPLIERS[3]
        shift = _WORD_BITS - self._bits
        return (one & _WORD) >> shift, (two & _WORD) >> shift, (four & _WORD) >> shift

    def _add_many(self, start: int, end: int) -> None:
        shift = np.uint64(_WORD_BITS - self._bits)
        first = max(0, start - _LONGEST)
        row = np.array(self.token_ids[first:end], dtype=np.int64).astype(np.uint64)
        for length, table in zip(LENGTHS, self._tables, strict=True):
            begin = max(start, length)
            if begin < end:
                places = np.arange(begin, end, dtype=np.int32)
                hashes = _hashes(row, begin - first, length) >> shift
                np.frombuffer(table, dtype=np.int32)[hashes] = places  # of equals, the last stays


def _short(token_ids: TokenIds, end: int) -> list[int]:
    """Return the tokens before `end`, with zeros in front if they are fewer than `_LONGEST`."""
    return [0] * (_LONGEST - end) + list(token_ids[:end])


def _hashes(row: npt.NDArray[np.uint64], begin: int, length: int) -> npt.NDArray[np.uint64]:
    """Return the hashes of the runs of `length` before each token from `begin` on."""
    hashes = np.zeros(len(row) - begin, dtype=np.uint64)
    for place, multiplier in zip(range(begin - 1, -1, -1), _MULTIPLIERS[:length], strict=False):
        hashes += row[place : place + len(hashes)] * np.uint64(multiplier)
    return hashes & np.uint64(_WORD)
