"""Which request has which blocks, and which blocks are shared."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from legato.core.request import Request
from legato.kv import cache_events
from legato.kv.block_pool import runs_of
from legato.kv.manager import KVCacheManager
from tests.kv.cache_watcher import CacheWatcher, cached_prompts
from tests.kv.conftest import BLOCK_SIZE
from tests.kv.conservation import check_blocks
from tests.kv.holding import HoldingMachine
from tests.kv.requests import CountedTokens, request_for
from tests.profiles import examples

HELLO = range(100, 110)  # two full blocks, and two tokens more


def compute(kv: KVCacheManager, request: Request, num_tokens: int | None = None) -> None:
    """Compute the request up to `num_tokens`, by default all of it."""
    request.num_computed_tokens = request.num_tokens if num_tokens is None else num_tokens
    kv.commit(request)


def found(kv: KVCacheManager, request: Request) -> tuple[int, int, int | None]:
    """Tokens that are in the cache, those of them that are computed, and who writes the next."""
    way = kv.lookup.match(request)
    return way.num_tokens, way.num_computed_tokens, way.next_block


def served(kv: KVCacheManager, request: Request) -> Request:
    """The request after it has been computed and has ended."""
    assert kv.reserve(request)
    compute(kv, request)
    kv.release(request)
    return request


def test_a_growing_request_stays_in_one_run() -> None:
    manager = KVCacheManager(num_blocks=1024, block_size=16)
    requests = [request_for(name, [ord(name)]) for name in "abcdefgh"]
    for _ in range(500):
        for request in requests:
            assert manager.reserve(request)
            compute(manager, request)
            request.append(7, 0.0)
    for request in requests:
        assert len(list(runs_of(manager.block_ids(request)))) == 1


def test_reserve_is_all_or_nothing() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=BLOCK_SIZE)
    request, other = request_for("a", range(9)), request_for("b", range(50, 55))
    assert manager.reserve(request)
    assert manager.num_free_blocks == 1
    assert not manager.reserve(other)
    assert not manager.fits(request_for("c", [50]), spare_blocks=1)
    assert manager.num_free_blocks == 1
    for _ in range(3):
        request.append(7, 0.0)
    assert manager.reserve(request), "the third block has room"
    assert manager.num_free_blocks == 1
    assert manager.usage == 0.75
    manager.release(request)
    manager.release(request)
    assert manager.num_free_blocks == 4


def test_full_blocks_outlive_their_request(kv: KVCacheManager) -> None:
    served(kv, request_for("a", HELLO))
    assert found(kv, request_for("b", HELLO)) == (8, 8, None)
    assert found(kv, request_for("b", [*HELLO][:6])) == (4, 4, None)
    assert found(kv, request_for("b", [1, *HELLO])) == (0, 0, None)
    assert kv.usage == 0.0


def test_the_last_token_is_never_cached(kv: KVCacheManager) -> None:
    """Two blocks are all of the prompt; something must be computed to sample from."""
    served(kv, request_for("a", HELLO))
    assert kv.lookup.match(request_for("b", [*HELLO][:8])).num_computed_tokens == 4


def test_blocks_are_shared_chunk_by_chunk_while_they_are_computed(kv: KVCacheManager) -> None:
    first, second = request_for("a", HELLO), request_for("b", HELLO)
    assert kv.reserve(first)
    assert found(kv, second) == (8, 0, kv.next_block(first))
    assert kv.reserve(second)
    assert kv.num_free_blocks == 16 - 2 - 2, "two shared ones, and one of each one's own"
    for num_tokens, num_shared in ((3, 3), (4, 4), (7, 7), (10, 8)):
        compute(kv, first, num_tokens)
        assert kv.num_computed_tokens(second) == num_shared
    assert kv.block_ids(first)[:2] == kv.block_ids(second)[:2]
    assert kv.block_ids(first)[2] != kv.block_ids(second)[2]


def test_what_was_not_computed_is_not_left_behind(kv: KVCacheManager) -> None:
    request = request_for("a", HELLO)
    assert kv.reserve(request)
    compute(kv, request, 7)
    kv.release(request)
    assert kv.lookup.match(request_for("b", HELLO)).num_tokens == 4


def test_a_follower_goes_on_where_its_leader_stopped(kv: KVCacheManager) -> None:
    first, second = request_for("a", HELLO), request_for("b", HELLO)
    assert kv.reserve(first)
    assert kv.reserve(second)
    compute(kv, first, 6)
    kv.release(first)
    assert kv.num_computed_tokens(second) == 6
    compute(kv, second)
    assert kv.lookup.match(request_for("c", HELLO)).num_computed_tokens == 8


def test_outputs_are_shared_too(kv: KVCacheManager) -> None:
    request = request_for("a", HELLO)
    assert kv.reserve(request)
    for token_id in (1, 2, 3):
        compute(kv, request)
        request.append(token_id, 0.0)
        assert kv.reserve(request)
    assert kv.lookup.match(request_for("b", [*HELLO, 1, 2, 3])).num_computed_tokens == 12


def test_what_drafts_have_filled_is_shared_once_the_request_has_their_tokens(
    kv: KVCacheManager,
) -> None:
    request = request_for("a", HELLO)
    assert kv.reserve(request)
    compute(kv, request, 12)
    assert kv.lookup.match(request_for("b", [*HELLO, 1, 2, 3])).num_tokens == 8
    for token_id in (1, 2, 3):
        request.append(token_id, 0.0)
    compute(kv, request, 12)
    assert kv.lookup.match(request_for("b", [*HELLO, 1, 2, 3])).num_tokens == 12


def test_the_same_block_twice_becomes_one(kv: KVCacheManager) -> None:
    """Both compute the block of their last token; the second finds it there already."""
    first, second = request_for("a", [*HELLO][:8]), request_for("b", [*HELLO][:8])
    assert kv.reserve(first)
    assert kv.reserve(second)
    compute(kv, first)
    compute(kv, second)
    assert kv.block_ids(first) == kv.block_ids(second)
    assert kv.num_free_blocks == 14


def test_a_block_that_another_is_to_compute_does_not_take_its_place(kv: KVCacheManager) -> None:
    scored, waiting = request_for("a", HELLO, prompt_logprobs=0), request_for("b", HELLO)
    assert kv.reserve(waiting)
    assert kv.reserve(scored)
    compute(kv, scored)
    assert kv.num_computed_tokens(waiting) == 0
    assert not set(kv.block_ids(scored)) & set(kv.block_ids(waiting))


def test_what_is_to_be_scored_is_computed_but_left_behind(kv: KVCacheManager) -> None:
    served(kv, request_for("a", HELLO))
    scored = request_for("b", [*HELLO, 1, 2, 3], prompt_logprobs=1)
    assert found(kv, scored) == (0, 0, None)
    served(kv, scored)
    assert kv.lookup.match(request_for("c", [*HELLO, 1, 2, 3])).num_tokens == 12
    scored.append(7, 0.0)
    assert kv.lookup.match(scored).num_tokens == 12, "it was scored before it was preempted"


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None), (None, "a")])
def test_salts_keep_requests_apart(kv: KVCacheManager, salts: tuple[str | None, ...]) -> None:
    served(kv, request_for("a", HELLO, cache_salt=salts[0]))
    assert kv.lookup.match(request_for("b", HELLO, cache_salt=salts[1])).num_tokens == 0
    assert kv.lookup.match(request_for("b", HELLO, cache_salt=salts[0])).num_tokens == 8


def test_without_caching_nothing_is_shared_or_kept() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=BLOCK_SIZE, enable_prefix_caching=False)
    request = request_for("a", HELLO)
    assert kv.reserve(request)
    compute(kv, request)
    assert kv.lookup.match(request_for("b", HELLO)).num_tokens == 0
    assert kv.num_computed_tokens(request) == 0
    kv.release(request)
    check_blocks(kv)
    assert kv._pool.num_free == 16


def test_the_least_recently_used_leaf_goes_first() -> None:
    kv = KVCacheManager(num_blocks=6, block_size=BLOCK_SIZE)
    long, short = request_for("long", range(12)), request_for("short", range(50, 58))
    served(kv, long)
    served(kv, short)
    assert kv.num_free_blocks == 6
    served(kv, request_for("again", range(12)))
    served(kv, request_for("new", range(90, 98)))
    assert kv.lookup.match(request_for("b", [*range(50, 58), 0])).num_tokens == 4, "its leaf went"
    assert kv.lookup.match(request_for("b", [*range(12), 0])).num_tokens == 12, "used again since"
    served(kv, request_for("newer", range(70, 78)))
    assert kv.lookup.match(request_for("b", [*range(50, 58), 0])).num_tokens == 0
    assert kv.lookup.match(request_for("b", [*range(12), 0])).num_tokens == 8, "from its end on"
    check_blocks(kv)


def test_cached_blocks_in_use_need_no_room() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=BLOCK_SIZE)
    first, second = request_for("a", HELLO), request_for("b", HELLO)
    assert kv.reserve(first)
    assert kv.fits(second)
    assert not kv.fits(second, spare_blocks=1)
    assert not kv.fits(request_for("c", range(10)))
    assert kv.reserve(second)
    assert kv.num_free_blocks == 0


_MOST_CAUGHT_UP = cache_events._MOST_CAUGHT_UP


@pytest.mark.parametrize("num_common", [0, 100, 300, 400, 800])
def test_a_prompt_is_compared_again_only_where_the_cache_changed(num_common: int) -> None:
    """While it waits, others grow, come and go; then its path is split, and at last evicted."""
    kv = KVCacheManager(1000, BLOCK_SIZE)
    stream = request_for("a", range(401))
    assert kv.reserve(stream)
    request = request_for("b", [*range(num_common), *range(5000, 5400)])
    tokens = request.token_ids = CountedTokens("i", request.token_ids)

    def num_read() -> int:
        before = tokens.num_read
        found = kv.lookup.match(request)
        num_read = tokens.num_read - before
        end = kv.lookup.num_shareable(request)
        assert found == kv._tree.match(kv.lookup.sought(request), end)
        return num_read

    assert num_read() >= num_common // 2
    stream.num_computed_tokens = 401
    for token_id in range(401, 500):
        kv.commit(stream)
        stream.append(token_id, 0.0)
        assert kv.reserve(stream)
        stream.num_computed_tokens = stream.num_tokens
        other = request_for(f"c{token_id}", [token_id] * 9)
        assert kv.reserve(other)
        kv.release(other)
        assert num_read() <= 3 * BLOCK_SIZE
    assert kv.reserve(request_for("d", [*range(200), 1, 2, 3]))
    num_read()
    assert num_read() <= 3 * BLOCK_SIZE
    kv.release(stream)
    kv.forget()
    num_read()
    assert num_read() <= 3 * BLOCK_SIZE


class ManagerMachine(HoldingMachine):
    """Requests over few tokens, so that they begin alike, in a cache that is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(num_blocks=12, block_size=2, num_host_slots=4)
        self.watcher = CacheWatcher()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from([None, None, "a"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def begin(self, prompt: list[int], salt: str | None, prompt_logprobs: int | None) -> None:
        self.num_added += 1
        request = request_for(
            str(self.num_added), prompt, cache_salt=salt, prompt_logprobs=prompt_logprobs
        )
        match, fits = self.kv.lookup.match(request), self.kv.fits(request)
        assert match.num_computed_tokens <= match.num_tokens < request.num_tokens
        assert self.kv.reserve(request) is fits
        if fits:
            self.held.append(request)
            assert self.kv.num_computed_tokens(request) == match.num_computed_tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_tokens=st.integers(1, 8))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        request = data.draw(st.sampled_from(self.held))
        request.catch_up(self.kv.num_computed_tokens(request))
        end = min(request.num_tokens, request.num_computed_tokens + num_tokens)
        request.num_computed_tokens = end
        self.kv.commit(request)

    @initialize(most=st.sampled_from([1, 3, 1000]))
    def catch_up_slowly(self, most: int) -> None:
        cache_events._MOST_CAUGHT_UP = most

    def teardown(self) -> None:
        cache_events._MOST_CAUGHT_UP = _MOST_CAUGHT_UP

    @rule()
    def tell_all(self) -> None:
        while self.kv.has_untold_blocks:
            self.watcher.take(self.kv.take_events())

    @invariant()
    def who_watches_knows_what_is_cached(self) -> None:
        self.watcher.take(self.kv.take_events())
        if self.watcher.is_watching:
            known, cached = self.watcher.prompts(), cached_prompts(self.kv)
            assert known <= cached if self.kv.has_untold_blocks else known == cached

    @invariant()
    def requests_have_blocks_for_all_tokens(self) -> None:
        for request in self.held:
            assert len(self.kv.block_ids(request)) == -(-request.num_tokens // 2)


TestManager = ManagerMachine.TestCase
TestManager.settings = examples(150, stateful_step_count=60)


def test_what_is_let_go_of_under_steps_in_flight_comes_free_with_the_last() -> None:
    kv = KVCacheManager(num_blocks=8, block_size=BLOCK_SIZE)
    request = request_for("a", range(9))
    assert kv.reserve(request)
    kv.begin_step()
    kv.begin_step()
    kv.release(request)
    kv.end_step()
    assert kv.num_free_blocks == 5
    check_blocks(kv)
    kv.begin_step()  # planned after that, so that it names none of them
    kv.end_step()
    assert kv.num_free_blocks == 8
    check_blocks(kv)
