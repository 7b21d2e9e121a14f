"""Finds where the last tokens of a row occurred before."""

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
_LEAST_MOVED, _CLEARED = 256, 16
"""Tokens indexed in larger tables at a time, at least, and slots of them cleared for each token:
with as many tokens to index as the row had before, the larger tables are ready at once."""


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

    The tables of a row that outgrew them are replaced by larger ones over many calls of `extend`,
    which use the old ones meanwhile. So memory is 24 to 48 bytes a token for any tokens, 72 while
    tables are replaced, and the time for a token does not grow with the row.

    Args:
        token_ids: the row, which the caller appends to.

    Attributes:
        num_indexed: tokens up to which the runs before them are in the index.
    """

    def __init__(self, token_ids: TokenIds) -> None:
        self.token_ids = token_ids
        self.num_indexed = 0
        self._tables = _Tables(0)
        self._larger: _Tables | None = None
        self._num_moved = 0  # tokens up to which the runs before them are in the larger tables

    def extend(self, end: int) -> None:
        """Index the runs before each token up to `end`.

        The first tables of a long row are ready only after some calls, which index nothing, unless
        there are as many tokens to index as a quarter of the row.
        """
        if self._larger is not None or 2 * end > self._tables.num_slots:
            self._grow(max(end - self.num_indexed, _LEAST_MOVED))
        if self._tables.num_slots:
            self._tables.add(self.token_ids, self.num_indexed, end)
            self.num_indexed = max(end, self.num_indexed)

    def find(self, token_ids: TokenIds, end: int) -> Place | None:
        """Find the last occurrence of the tokens before `end` of this row or another.

        The longest run of `LENGTHS` that occurs is taken.
        """
        if not self._tables.num_slots:
            return None
        own, places = self.token_ids, self._tables.found(token_ids, end)
        for length, at in zip(reversed(LENGTHS), reversed(places), strict=True):
            if at and end >= length and own[at - length : at] == token_ids[end - length : end]:
                return Place(at, self._common(token_ids, end, at, length))
        return None

    def _grow(self, count: int) -> None:
        """Index `count` more tokens in larger tables, which at last replace the others."""
        if self._larger is None:
            bits = max(_LEAST_BITS, len(self.token_ids).bit_length() + 1)
            self._larger, self._num_moved = _Tables(bits), 0
        if not self._larger.clear(_CLEARED * count):
            return
        end = min(self.num_indexed, self._num_moved + count)
        self._larger.add(self.token_ids, self._num_moved, end)
        self._num_moved = end
        if end == self.num_indexed:
            self._tables, self._larger = self._larger, None

    def _common(self, token_ids: TokenIds, end: int, at: int, length: int) -> int:
        """Return how many tokens before `end` and before `at` are equal; at least `length` are."""
        own, most = self.token_ids, min(_MOST_COMPARED, at, end)
        while length < most and own[at - length - 1] == token_ids[end - length - 1]:
            length += 1
        return length


class _Tables:
    """For each of `LENGTHS`, the places of runs at their hashes.

    Of runs with equal hashes the later place is kept; 0 is no place.

    Args:
        bits: of the number of slots; 0 for no slots.

    Attributes:
        num_slots: slots of each table.
    """

    def __init__(self, bits: int) -> None:
        self._shift = _WORD_BITS - bits
        self.num_slots = 1 << bits if bits else 0
        self._num_cleared = 0
        self._arrays = [np.empty(self.num_slots, dtype=np.int32) for _ in LENGTHS]
        self._tables = [array.data for array in self._arrays]

    def clear(self, count: int) -> bool:
        """Clear `count` more slots; return whether all are clear, as they must be for any use."""
        end = min(self.num_slots, self._num_cleared + count)
        for table in self._arrays:
            table[self._num_cleared : end] = 0
        self._num_cleared = end
        return end == self.num_slots

    def add(self, token_ids: TokenIds, start: int, end: int) -> None:
        """Add the runs before the tokens [start, end)."""
        if end - start > _LONGEST:
            self._add_many(token_ids, start, end)
            return
        for at in range(start, end):
            slots = self._slots(token_ids, at)
            for length, table, slot in zip(LENGTHS, self._tables, slots, strict=True):
                if at >= length:
                    table[slot] = at

    def found(self, token_ids: TokenIds, end: int) -> list[int]:
        """Return the place of a run like that before `end`, for each of `LENGTHS`, or of another.

        The place for a run that would begin before the row has no meaning.
        """
        slots = self._slots(token_ids, end)
        return [table[slot] for table, slot in zip(self._tables, slots, strict=True)]

    def _slots(self, token_ids: TokenIds, end: int) -> tuple[int, int, int]:
        """Return the table slots of the runs before `end`, in order of `LENGTHS`.

        The slot of a run that would begin before the row has no meaning.
        """
        a, b, c, d = token_ids[end - _LONGEST : end] if end >= _LONGEST else _short(token_ids, end)
        one = d * _MULTIPLIERS[0]
        two = one + c * _MULTIPLIERS[1]
        four = two + b * _MULTIPLIERS[2] + a * _MULTIPLIERS[3]
        shift = self._shift
        return (one & _WORD) >> shift, (two & _WORD) >> shift, (four & _WORD) >> shift

    def _add_many(self, token_ids: TokenIds, start: int, end: int) -> None:
        shift = np.uint64(self._shift)
        first = max(0, start - _LONGEST)
        row = np.array(token_ids[first:end], dtype=np.int64).astype(np.uint64)
        for length, table in zip(LENGTHS, self._arrays, strict=True):
            begin = max(start, length)
            if begin < end:
                places = np.arange(begin, end, dtype=np.int32)
                hashes = _hashes(row, begin - first, length) >> shift
                table[hashes] = places  # of equals, the last stays


def _short(token_ids: TokenIds, end: int) -> list[int]:
    """Return the tokens before `end`, with zeros in front if they are fewer than `_LONGEST`."""
    return [0] * (_LONGEST - end) + list(token_ids[:end])


def _hashes(row: npt.NDArray[np.uint64], begin: int, length: int) -> npt.NDArray[np.uint64]:
    """Return the hashes of the runs of `length` before each token from `begin` on."""
    hashes = np.zeros(len(row) - begin, dtype=np.uint64)
    for place, multiplier in zip(range(begin - 1, -1, -1), _MULTIPLIERS[:length], strict=False):
        hashes += row[place : place + len(hashes)] * np.uint64(multiplier)
    return hashes & np.uint64(_WORD)
