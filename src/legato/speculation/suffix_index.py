"""Where in a row of tokens its last few stood before."""

from array import array
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from legato.core.token_ids import TokenIds

LENGTHS = (1, 2, 4)
"""Of the runs that are looked up."""
_LONGEST = LENGTHS[-1]
_MOST_COMPARED = 32
"""Tokens up to which it is found out how long a match is."""
_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
"""Odd numbers of 32 bits without a pattern; hashing by multiplication and the highest bits, as in
Knuth, The Art of Computer Programming, vol. 3, 6.4. The last token has the first, so that the sums
of shorter runs are those that longer ones begin with."""
_WORD_BITS = 32
_WORD = 2**_WORD_BITS - 1
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
        self._tables: tuple[array[int], ...] = ()  # of each length, places by hash

    def extend(self, end: int) -> None:
        """Take in the runs before each token up to `end`."""
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
        """Where the tokens before `end` of a row, this one or another, stood last.

        The longest run of `LENGTHS` that did is taken.
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
        """How many tokens are the same before `end` and before `at`, where `length` are."""
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
        """Where the places of the runs before `end` are, by their `LENGTHS`; those of runs that
        would begin before the row say nothing."""
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
    """The tokens before `end`, with zeros in front where they are fewer than `_LONGEST`."""
    return [0] * (_LONGEST - end) + list(token_ids[:end])


def _hashes(row: npt.NDArray[np.uint64], begin: int, length: int) -> npt.NDArray[np.uint64]:
    """Those of the runs of `length` before each token from `begin` on, the last token first."""
    hashes = np.zeros(len(row) - begin, dtype=np.uint64)
    for place, multiplier in zip(range(begin - 1, -1, -1), _MULTIPLIERS[:length], strict=False):
        hashes += row[place : place + len(hashes)] * np.uint64(multiplier)
    return hashes & np.uint64(_WORD)
