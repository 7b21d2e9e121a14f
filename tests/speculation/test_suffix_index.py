"""Every place that the index finds is one, and it misses few."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.token_ids import TokenIds, token_array
from legato.speculation.suffix_index import LENGTHS, SuffixIndex, _Tables
from tests.kv.requests import CountedTokens

MOST_COMPARED = 32

token_ids = st.integers(0, 2) | st.sampled_from([-1, 2**31 - 1])
rows = st.lists(token_ids, max_size=300).map(token_array)


def common(row: TokenIds, at: int, other: TokenIds, end: int) -> int:
    """How many tokens are the same before `at` and before `end`."""
    length = 0
    while length < min(at, end) and row[at - length - 1] == other[end - length - 1]:
        length += 1
    return length


def last_place(row: TokenIds, num_indexed: int, other: TokenIds, end: int) -> int | None:
    """Where the longest run before `end` that stood in the row before stood last."""
    for length in reversed(LENGTHS):
        if end < length:
            continue
        for at in range(num_indexed - 1, length - 1, -1):
            if row[at - length : at] == other[end - length : end]:
                return at
    return None


@given(row=rows, other=st.none() | rows, data=st.data())
def test_what_is_found_is_there(row: TokenIds, other: TokenIds | None, data: st.DataObject) -> None:
    """In the row itself, and in others; however the row has grown."""
    growing = token_array(())
    index = SuffixIndex(growing)
    while len(growing) < len(row):
        count = data.draw(st.integers(1, 40))
        growing.extend(row[len(growing) : len(growing) + count])
        index.extend(len(growing))
        assert index.num_indexed == len(growing)
        sought = growing if other is None else other
        for end in range(len(sought) + 1) if other is not None else [len(growing)]:
            place = index.find(sought, end)
            if place is None:
                continue
            assert 0 < place.at < len(growing)
            length = common(growing, place.at, sought, end)
            assert place.length == min(length, MOST_COMPARED) > 0


@given(row=rows, data=st.data())
def test_it_finds_the_same_however_it_was_filled(row: TokenIds, data: st.DataObject) -> None:
    at_once, by_slices, one_by_one = (SuffixIndex(row) for _ in range(3))
    at_once.extend(len(row))
    while by_slices.num_indexed < len(row):
        count = data.draw(st.integers(1, 40))
        by_slices.extend(min(len(row), by_slices.num_indexed + count))
    for end in range(1, len(row) + 1):
        one_by_one.extend(end)
    for end in range(len(row) + 1):
        assert at_once.find(row, end) == by_slices.find(row, end) == one_by_one.find(row, end)


@pytest.mark.parametrize("vocab_size", [2, 20, 1000, 50_000])
def test_it_finds_the_last_place_of_the_longest_run_but_for_few(vocab_size: int) -> None:
    """Runs whose hashes meet hide each other: that must be rare."""
    rng = random.Random(vocab_size)
    whole = token_array(rng.choices(range(vocab_size), k=400))
    whole.extend(whole[50:150])
    row = token_array([])
    index, num_missed = SuffixIndex(row), 0
    for end, token_id in enumerate(whole, 1):
        row.append(token_id)
        index.extend(end)
        place = index.find(row, end)
        num_missed += (None if place is None else place.at) != last_place(row, end, row, end)
    assert num_missed < 0.2 * len(row)


def test_nothing_is_found_in_nothing() -> None:
    index = SuffixIndex(token_array(()))
    assert index.find(token_array([1, 2, 3]), 3) is None
    index.extend(0)
    assert index.find(token_array([1, 2, 3]), 3) is None
    index = SuffixIndex(token_array([1, 1]))
    index.extend(2)
    assert index.find(token_array([1]), 0) is None


def test_the_longest_run_is_taken_though_a_shorter_one_stood_later() -> None:
    row = token_array([1, 2, 3, 4, 5, 9, 4, 7, 1, 2, 3, 4])
    index = SuffixIndex(row)
    index.extend(len(row))
    assert index.find(row, len(row)) == (4, 4)
    assert index.find(token_array([8, 4]), 2) == (7, 1)


def test_a_long_match_is_not_followed_to_its_beginning() -> None:
    row = token_array([*range(100), *range(100)])
    index = SuffixIndex(row)
    index.extend(len(row))
    assert index.find(token_array(range(20)), 20) == (120, 20)
    assert index.find(token_array(range(60)), 60) == (160, MOST_COMPARED)


@pytest.mark.parametrize("num_tokens", [128, 1000, 4095, 4096, 50_000])
def test_memory_is_a_few_bytes_a_token(num_tokens: int) -> None:
    row = token_array([])
    index = SuffixIndex(row)
    for token_id in range(num_tokens):
        row.append(token_id)
        index.extend(len(row))
        assert num_bytes(index) <= 72 * max(len(row), 129)
    assert 24 * num_tokens <= num_bytes(index) <= 48 * num_tokens


def num_bytes(index: SuffixIndex) -> int:
    tables = [tables for tables in (index._tables, index._larger) if tables is not None]
    return sum(array.nbytes for each in tables for array in each._arrays)


@pytest.mark.parametrize("num_tokens", [2**12, 2**16])
@pytest.mark.parametrize("at_a_time", [1, 3, 60])
def test_no_call_indexes_a_long_row_again(
    num_tokens: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it outgrows its tables; what is found is there meanwhile, and everything at last."""
    cleared: list[int] = []
    clear = _Tables.clear

    def counted(tables: _Tables, count: int) -> bool:
        before = tables._num_cleared
        is_clear = clear(tables, count)
        cleared.append(tables._num_cleared - before)
        return is_clear

    rng = random.Random(num_tokens)
    row = CountedTokens("i", rng.choices(range(50_000), k=num_tokens - 200))
    index = SuffixIndex(row)
    index.extend(len(row))
    num_slots = index._tables.num_slots
    monkeypatch.setattr(_Tables, "clear", counted)
    while index._tables.num_slots == num_slots:
        row.extend(rng.choices(range(50_000), k=at_a_time))
        num_read, cleared[:] = row.num_read, []
        index.extend(len(row))
        assert index.num_indexed == len(row)
        assert row.num_read - num_read <= 600
        assert sum(cleared) <= 5000
        assert index.find(row, len(row) - 5) in (None, (len(row) - 5, MOST_COMPARED))
        assert len(row) < 1.5 * num_tokens
    at_once = SuffixIndex(row)
    at_once.extend(len(row))
    assert all(index.find(row, end) == at_once.find(row, end) for end in range(len(row)))


def test_a_row_that_grows_at_once_is_found_at_once() -> None:
    row = token_array(range(1000))
    index = SuffixIndex(row)
    index.extend(1000)
    row.extend(range(1000, 60_000))
    index.extend(60_000)
    num_found = sum(index.find(row, end) == (end, MOST_COMPARED) for end in range(100, 60_000))
    assert num_found > 0.7 * len(row)


def test_the_tables_of_a_long_row_are_not_made_in_one_call() -> None:
    row = token_array(range(10**6))
    index = SuffixIndex(row)
    sizes = []
    while index.num_indexed < 50_000:
        index.extend(index.num_indexed + 1000)
        assert index._larger is None or index._larger._num_cleared <= 16_000 * len(sizes) + 16_000
        sizes.append(index.num_indexed)
    assert max(b - a for a, b in pairwise(sizes)) == 1000
    assert sizes.count(0) == 2**21 // 16_000
