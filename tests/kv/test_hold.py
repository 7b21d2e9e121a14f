"""Blocks that are kept for another engine, or on their way from it."""

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from legato.core.kv_transfer import FetchBlocks, KVTransfer, SendBlocks
from legato.core.request import Request
from legato.core.slo import ServiceParams, SloClass
from legato.kv.hold import Hold, prompt_digest
from legato.kv.manager import BorrowedBlocks, KVCacheManager
from tests.kv.conftest import BLOCK_SIZE
from tests.kv.conservation import check_blocks
from tests.kv.requests import request_for

PROMPT = range(100, 118)  # four full blocks, and two tokens more
FETCHED, SENT = FetchBlocks("a", "127.0.0.1", 1), SendBlocks("a")


def transferred(request_id: str, transfer: KVTransfer | None = FETCHED) -> Request:
    return fetching(request_id, PROMPT, transfer)


def fetching(
    request_id: str, prompt: Sequence[int], transfer: KVTransfer | None = FETCHED
) -> Request:
    message = request_for(request_id, prompt).message
    message = msgspec.structs.replace(message, kv_transfer=transfer)
    return Request(message, SloClass(), max_model_len=100_000)


def begun(kv: KVCacheManager, request: Request) -> Hold:
    found = kv.lookup.match(request)
    assert kv.reserve(request, found)
    kv.holds.begin(request, found)
    [hold] = kv.holds.take_new()
    return hold


def compute(kv: KVCacheManager, request: Request, num_tokens: int) -> None:
    request.num_computed_tokens = num_tokens
    kv.commit(request)


@given(salts=st.lists(st.none() | st.text(max_size=5), min_size=2, max_size=2, unique=True))
@example(salts=[None, "None"])
@example(salts=[None, ""])
def test_another_salt_is_another_digest(salts: list[str | None]) -> None:
    one, other = (
        msgspec.structs.replace(transferred("a").message, service=ServiceParams(cache_salt=salt))
        for salt in salts
    )
    assert prompt_digest(one) != prompt_digest(other)
    assert prompt_digest(one) == prompt_digest(msgspec.structs.replace(one, request_id="b"))


@pytest.mark.parametrize("num_arrived", [0, 4, 12])
def test_what_may_still_be_written_to_has_other_blocks_in_its_place(
    kv: KVCacheManager, num_arrived: int
) -> None:
    request, other, third = (transferred(name) for name in "abc")
    hold = begun(kv, request)
    begun(kv, other)
    assert kv.reserve(transferred("c", None))
    if num_arrived:
        kv.holds.note_arrived("a", num_arrived)
    left = set(hold.blocks(num_arrived))
    kept = list(hold.blocks(0, num_arrived))
    assert kv.quarantine.begin("a")
    check_blocks(kv)
    for one in (request, other, third):
        table = kv.block_ids(one)
        assert left.isdisjoint(table)
        assert list(table[: num_arrived // BLOCK_SIZE]) == kept
    kv.holds.end_arrival("a")
    check_blocks(kv)
    assert kv.holds.arriving_from(request) == request.num_tokens
    compute(kv, request, 17)
    assert kv.num_computed_tokens(other) == 16
    kv.holds.end_arrival("b")
    for one in (request, other, third):
        kv.release(one)
    assert kv.num_free_blocks == kv.num_blocks - len(left)
    kv.quarantine.end("a")
    assert kv.num_free_blocks == kv.num_blocks


def test_without_free_blocks_there_is_nothing_to_put_in_their_place(kv: KVCacheManager) -> None:
    request = transferred("a")
    begun(kv, request)
    taken = kv.borrow(fewest=9, most=9)
    assert taken is not None
    assert not kv.quarantine.begin("a")
    check_blocks_without(kv, taken)
    kv.give_back(taken)
    assert kv.quarantine.begin("a")
    kv.quarantine.end("a")


def check_blocks_without(kv: KVCacheManager, taken: BorrowedBlocks) -> None:
    kv.give_back(taken)
    check_blocks(kv)
    again = kv.borrow(fewest=9, most=9)
    assert again is not None
    assert sorted(again.block_ids) == sorted(taken.block_ids)


def test_what_is_fetched_is_nobodys_to_compute_until_it_arrives(kv: KVCacheManager) -> None:
    request, other = transferred("a"), transferred("b", None)
    assert kv.lookup.num_hit_tokens(request) == 16
    assert kv.holds.arriving_from(request, kv.lookup.match(request)) == 0
    begun(kv, request)
    assert kv.holds.arriving_from(other, kv.lookup.match(other)) == 0
    for num_tokens in (4, 12):
        kv.holds.note_arrived("a", num_tokens)
        assert kv.num_computed_tokens(request) == kv.holds.arriving_from(request) == num_tokens
        assert kv.lookup.match(other).num_computed_tokens == num_tokens
    kv.holds.note_arrived("a", 16)
    kv.holds.end_arrival("a")
    assert kv.holds.arriving_from(request) == request.num_tokens


def test_what_never_arrives_is_computed(kv: KVCacheManager) -> None:
    request = transferred("a")
    begun(kv, request)
    kv.holds.note_arrived("a", 8)
    kv.holds.end_arrival("a")
    assert kv.num_computed_tokens(request) == 8
    assert kv.holds.arriving_from(request) == request.num_tokens
    compute(kv, request, 18)
    kv.release(request)
    assert kv.num_free_blocks == kv.num_blocks


def test_blocks_stay_for_a_transfer_whose_request_is_gone(kv: KVCacheManager) -> None:
    request = transferred("a")
    begun(kv, request)
    kv.release(request)
    assert kv.num_free_blocks == 16 - 4, "they are still written to"
    kv.holds.note_arrived("a", 8)
    kv.holds.end_arrival("a")
    assert kv.num_free_blocks == 16
    assert kv.lookup.match(transferred("b")).num_computed_tokens == 8, "what came is worth keeping"


def test_only_what_nobody_has_is_fetched(kv: KVCacheManager) -> None:
    first = transferred("a", None)
    assert kv.reserve(first)
    compute(kv, first, 4)
    kv.release(first)
    hold = begun(kv, transferred("b"))
    assert (hold.start, hold.end) == (4, 16)
    assert len(hold.blocks(hold.start)) == 3


def test_what_arrives_counts_once_all_before_it_is_computed(kv: KVCacheManager) -> None:
    """The first request computes what both begin with, and the second one fetches the rest."""
    first = request_for("a", [*PROMPT][:9])
    assert kv.reserve(first)
    second = transferred("b")
    hold = begun(kv, second)
    assert (hold.start, hold.end) == (8, 16)
    kv.holds.note_arrived("b", 16)
    kv.holds.end_arrival("b")
    assert kv.num_computed_tokens(second) == 0
    assert kv.holds.arriving_from(second) == 8
    compute(kv, first, 8)
    assert kv.num_computed_tokens(second) == 16


def test_what_arrives_behind_what_arrives_counts_with_it(kv: KVCacheManager) -> None:
    first = request_for("a", [*PROMPT][:5])
    assert kv.reserve(first)
    second = fetching("b", [*PROMPT][:13])
    third = fetching("c", PROMPT)
    assert [begun(kv, request).start for request in (second, third)] == [4, 12]
    kv.holds.note_arrived("c", 16)
    kv.holds.note_arrived("b", 12)
    compute(kv, first, 4)
    assert kv.num_computed_tokens(third) == 16


class CountedSet(set[int]):
    """Counts how often it is asked for a member."""

    num_looks = 0

    def __contains__(self, member: object) -> bool:
        self.num_looks += 1
        return super().__contains__(member)


def calls(act: Callable[[], object]) -> int:
    """Return how many calls an act makes, those of built-in functions included."""
    count = 0

    def see(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event.endswith("call")

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("num_arrived", [0, 12], ids=["waits for blocks", "waits for its base"])
def test_a_commit_looks_at_no_fetch_that_it_does_not_complete(num_arrived: int) -> None:
    def calls_beside(num_fetches: int) -> int:
        kv = KVCacheManager(1000, BLOCK_SIZE)
        first, stream = request_for("a", [*PROMPT][:13]), request_for("b", range(50, 60))
        for request in (first, stream):
            assert kv.reserve(request)
        for i in range(num_fetches):
            begun(kv, fetching(f"f{i}", [*[*PROMPT][:8], i, 1, 2, 3, 4]))
            if num_arrived:
                kv.holds.note_arrived(f"f{i}", num_arrived)

        def commit() -> None:
            compute(kv, stream, 9)
            compute(kv, first, 6)

        num_calls = calls(commit)
        compute(kv, first, 8)
        for i in range(num_fetches):
            assert kv.holds[f"f{i}"].num_computed_tokens == max(8, num_arrived)
        return num_calls

    assert calls_beside(40) == calls_beside(2)


def test_blocks_arrive_one_by_one_at_the_cost_of_one() -> None:
    kv = KVCacheManager(1000, BLOCK_SIZE)
    begun(kv, fetching("a", range(4 * 500 + 1)))
    removed: list[int] = []

    class Removing(set[int]):
        def difference_update(self, *others: Iterable[int]) -> None:
            removed.append(len([*chain(*others)]))
            super().difference_update(*others)

    kv.holds._arriving = Removing(kv.holds._arriving)
    for num_blocks in range(1, 501):
        kv.holds.note_arrived("a", 4 * num_blocks)
    assert set(removed) == {1}


@pytest.mark.parametrize("is_fetched", [False, True])
def test_the_rest_of_a_prompt_is_not_searched_for_blocks_to_come(is_fetched: bool) -> None:
    kv = KVCacheManager(2000, BLOCK_SIZE)
    begun(kv, fetching("other", range(5000, 5010)))
    prompt = range(4 * 500 + 1)
    request = fetching("a", prompt) if is_fetched else request_for("a", prompt)
    if is_fetched:
        begun(kv, request)
        kv.holds.note_arrived("a", 800)
    else:
        assert kv.reserve(request)
    kv.holds._arriving = CountedSet(kv.holds._arriving)
    found = kv.lookup.match(request)
    for from_found in (None, found):
        end = kv.holds.arriving_from(request, from_found)
        assert end == (800 if is_fetched else request.num_tokens)
    assert kv.holds._arriving.num_looks <= 2


def test_what_arrived_is_forgotten_where_nobody_computes_what_comes_before_it(
    kv: KVCacheManager,
) -> None:
    first = request_for("a", [*PROMPT][:9])
    assert kv.reserve(first)
    second = transferred("b")
    begun(kv, second)
    kv.holds.note_arrived("b", 16)
    kv.holds.end_arrival("b")
    kv.release(first)
    assert kv.num_free_blocks == 16 - 5
    kv.release(second)
    assert kv.num_free_blocks == 16


def test_what_is_sent_cannot_be_evicted_before_it_was_taken(kv: KVCacheManager) -> None:
    request = transferred("a", SENT)
    hold = begun(kv, request)
    assert kv.holds.arriving_from(request) == request.num_tokens
    compute(kv, request, 7)
    assert hold.num_computed_tokens == 7
    compute(kv, request, 18)
    kv.release(request)
    assert hold.num_computed_tokens == hold.end == 16
    assert kv.num_free_blocks == 16 - 4
    kv.holds.let_go("a")
    assert kv.num_free_blocks == 16


def test_where_nothing_is_shared_nothing_is_fetched() -> None:
    kv = KVCacheManager(16, BLOCK_SIZE, enable_prefix_caching=False)
    request = transferred("a")
    hold = begun(kv, request)
    assert (hold.start, hold.end) == (0, 0)
    assert kv.holds.arriving_from(request) == request.num_tokens
    kv.holds.end_arrival("a")
    check_blocks(kv)
