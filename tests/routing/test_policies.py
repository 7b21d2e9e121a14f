"""Where policies send a request, by what they know of replicas."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.block_hash import block_hashes
from legato.core.errors import ConfigError
from legato.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, HitEnds
from legato.core.replica_state import ReplicaState
from legato.core.slo import SloClass
from legato.core.token_ids import token_array
from legato_fleet.routing.request import Placement, Role, RoutedRequest
from legato_fleet.routing.router import ROUTING_POLICIES, NoReplicaError, Router

PROMPT = token_array(range(160))
SLO = SloClass(itl_s=0.1, ttft_s=2.0)


def state(
    *, delay_s: float = 0.05, token_s: float = 1e-3, itl_s: float = 0.03, num_free_blocks: int = 900
) -> ReplicaState:
    return ReplicaState(
        num_blocks=1000,
        num_free_blocks=num_free_blocks,
        block_size=16,
        delay_s=delay_s,
        token_s=token_s,
        itl_s=itl_s,
        stream_s=1e-3,
    )


def request(
    request_id: str, num_tokens: int = 160, *, slo: SloClass = SLO, tenant: str = "default"
) -> RoutedRequest:
    return RoutedRequest(
        request_id=request_id,
        num_prompt_tokens=num_tokens,
        slo=slo,
        tenant=tenant,
        block_hashes=block_hashes(PROMPT, 16),
    )


def router(policy: str, *states: ReplicaState) -> Router:
    """A router in front of replicas "0", "1", ..., which have just reported."""
    made = Router(policy)
    for place, told in enumerate(states):
        made.join(str(place))
        made.note_state(str(place), told, 0.0)
    return made


def stored() -> BlockStored:
    hashes = block_hashes(PROMPT, 16)
    return BlockStored(
        block_hashes=hashes, parent_block_hash=None, token_ids=PROMPT.tolist(), block_size=16
    )


def test_round_robin_takes_turns() -> None:
    made = router("round-robin", *[state()] * 3)
    assert [made.route(request(str(n)), 0.0).decode for n in range(6)] == [*"012012"]


def test_of_two_the_less_loaded_one() -> None:
    made = router("power-of-two", *[state()] * 2)
    sent = Counter(made.route(request(str(n)), 0.0).decode for n in range(10))
    assert sent == {"0": 5, "1": 5}


@pytest.mark.parametrize("policy", ["prefix-affinity", "kept-promise"])
def test_a_prompt_goes_where_it_is_cached_until_it_is_not(policy: str) -> None:
    made = router(policy, *[state()] * 3)
    made.note_kv_events("1", [stored()])
    assert made.route(request("a"), 0.0).decode == "1"
    made.note_end("a", 10, 0.1)
    made.note_kv_events("1", [BlockRemoved(block_hashes=stored().block_hashes)])
    made.note_kv_events("2", [stored()])
    assert made.route(request("b"), 0.1).decode == "2"
    made.note_end("b", 10, 0.2)
    made.note_kv_events("2", [AllBlocksCleared()])
    assert made.route(request("c"), 0.2).decode == "0"


@pytest.mark.parametrize("policy", ["prefix-affinity", "kept-promise"])
def test_a_prompt_goes_where_its_states_are_kept(policy: str) -> None:
    """All have its blocks. The first has no state after any of them, the last one after most."""
    made = router(policy, *[state()] * 3)
    hashes = stored().block_hashes
    for replica, ends in (("0", []), ("1", [hashes[len(hashes) // 4]]), ("2", [hashes[-1]])):
        made.note_kv_events(replica, [HitEnds(), stored(), HitEnds(added=ends)])
    assert made.route(request("a"), 0.0).decode == "2"
    made.note_end("a", 10, 0.1)
    made.note_kv_events("2", [HitEnds(removed=[hashes[-1]])])
    assert made.route(request("b"), 0.1).decode == ("1" if policy == "kept-promise" else "0")


def test_equal_prompts_that_come_together_meet() -> None:
    """The second shares what is only about to be computed for the first."""
    made = router("kept-promise", *[state(token_s=5e-3)] * 3)
    assert len({made.route(request(str(n)), 0.0).decode for n in range(3)}) == 1


@pytest.mark.parametrize(("delay_s", "where"), [(1.0, "1"), (3.0, "0")])
def test_a_session_moves_to_an_idle_replica_rather_than_break_its_promise(
    delay_s: float, where: str
) -> None:
    """What is cached is 0.16 s of work, and the promise is 2 s."""
    made = router("kept-promise", state(), state(delay_s=delay_s))
    made.note_kv_events("1", [stored()])
    assert made.route(request("a"), 0.0).decode == where


def test_a_session_stays_where_moving_it_would_delay_many() -> None:
    """All replicas have much to do, so that a prefix computed twice delays all later requests."""
    made = router("kept-promise", state(delay_s=1.0), state(delay_s=3.0))
    for number in range(200):
        made.route(request(f"before {number}", slo=SloClass()), 0.05 * number)
        made.note_end(f"before {number}", 10, 0.05 * number)
    for place, delay_s in enumerate((1.0, 3.0)):
        made.note_state(str(place), state(delay_s=delay_s), 10.0)
    made.note_kv_events("0", [AllBlocksCleared()])
    made.note_kv_events("1", [stored()])
    assert made.route(request("a"), 10.0).decode == "1"


def test_where_the_promise_is_kept_goes_before_where_it_ends_earlier() -> None:
    slow_later = state(delay_s=0.1, itl_s=0.03)
    late_but_fast = state(delay_s=3.0, itl_s=0.01)
    assert router("kept-promise", late_but_fast, slow_later).route(request("a"), 0.0).decode == "1"
    # Without a promise for its first token, it would end earlier there.
    free = request("a", slo=SloClass())
    assert router("kept-promise", late_but_fast, slow_later).route(free, 0.0).decode == "0"


def test_what_is_sent_counts_until_the_next_snapshot_and_not_twice() -> None:
    made = router("kept-promise", *[state()] * 2)
    first = RoutedRequest(request_id="a", num_prompt_tokens=4000)
    assert made.route(first, 0.0).decode == "0"
    before_s = made.replicas["0"].ttft_s("default", 1, 1.0)
    assert before_s == pytest.approx(0.03 + 3.0, abs=0.1)  # a second of it is computed
    made.note_state("0", state(delay_s=3.05), 1.0)
    assert made.replicas["0"].ttft_s("default", 1, 1.0) == pytest.approx(before_s, abs=0.1)
    # Of others' requests, it knows only this.
    made.note_state("1", state(delay_s=5.0), 1.0)
    assert made.replicas["1"].ttft_s("default", 1, 2.0) == pytest.approx(4.0, abs=0.1)


def test_a_tenant_with_little_does_not_wait_for_one_with_much() -> None:
    made = router("kept-promise", state())
    for n in range(10):
        made.route(RoutedRequest(request_id=f"m{n}", num_prompt_tokens=1000, tenant="much"), 0.0)
    view = made.replicas["0"]
    assert view.ttft_s("much", 500, 0.0) > 10.0
    assert view.ttft_s("little", 500, 0.0) < 1.5  # its own, and as much of the other's


def test_streams_that_fill_the_cache_keep_long_prompts_away() -> None:
    full = state(num_free_blocks=10)
    made = router("kept-promise", full, state(delay_s=0.5))
    made.route(request("a", 100), 0.0)
    assert made.route(RoutedRequest(request_id="b", num_prompt_tokens=4000), 0.0).decode == "1"


def pools(*replica_ids: str) -> Router:
    """Replicas whose names begin with "p" prefill, the others decode."""
    made = Router("kept-promise")
    for replica_id in replica_ids:
        role: Role = "prefill" if replica_id.startswith("p") else "decode"
        made.join(replica_id, role, transfer_token_s=1e-6 if role == "decode" else None)
        made.note_state(replica_id, state(), 0.0)
    return made


def test_prefill_and_decode_apart() -> None:
    made = pools("p0", "p1", "d0", "d1")
    unlike = [RoutedRequest(request_id=str(n), num_prompt_tokens=1000) for n in range(4)]
    placements = [made.route(one, 0.0) for one in unlike]
    assert Counter(p.prefill for p in placements) == {"p0": 2, "p1": 2}
    assert Counter(p.decode for p in placements) == {"d0": 2, "d1": 2}
    made.note_prefilled("0", 1.0)
    assert made.replicas[placements[0].prefill or ""].num_in_flight == 1
    made.note_first_token("0", 1.1)
    made.note_end("0", 5, 2.0)
    assert made.replicas[placements[0].decode].num_in_flight == 1


@pytest.mark.parametrize(("num_tokens", "is_handed_over"), [(16, False), (17, True), (160, False)])
def test_what_the_one_that_decodes_has_is_not_computed_for_it(
    num_tokens: int, is_handed_over: bool
) -> None:
    """Only whole blocks are handed over, and the last token is computed where it is continued."""
    made = pools("p", "d")
    if num_tokens == len(PROMPT):
        made.note_kv_events("d", [stored()])
    placement = made.route(request("a", num_tokens), 0.0)
    assert (placement.prefill is not None) is is_handed_over
    assert made.replicas["p"].num_in_flight == is_handed_over
    made.note_end("a", 1, 1.0)
    assert not any(view.num_in_flight for view in made.replicas.values())


@pytest.mark.parametrize("gone", ["p", "d"])
def test_without_one_of_the_pools_the_other_does_both(gone: str) -> None:
    made = pools("p", "d")
    made.drain(gone)
    left = "d" if gone == "p" else "p"
    assert made.route(request("a"), 0.0) == Placement(prefill=None, decode=left)
    made.note_first_token("a", 1.0)
    made.leave(gone, 1.0)
    assert made.leave(left, 2.0).begun == ["a"]
    with pytest.raises(NoReplicaError):
        made.route(request("b"), 2.0)


def test_a_replica_that_goes() -> None:
    made = router("round-robin", *[state()] * 2)
    for n in range(4):
        made.route(request(str(n)), 0.0)
    made.note_first_token("2", 0.5)
    left = made.leave("0", 1.0)
    assert (left.waiting, left.begun) == (["0"], ["2"])
    made.drain("1")
    with pytest.raises(NoReplicaError):
        made.route(request("x"), 1.0)
    made.join("0")
    assert made.route(request("0"), 1.0) == Placement(prefill=None, decode="0")


def test_one_that_prefills_and_goes_takes_nothing_with_it() -> None:
    made = pools("p", "d")
    assert made.route(request("a"), 0.0).prefill == "p"
    assert made.leave("p", 0.5) == ([], [])
    made.note_first_token("a", 1.0)
    made.note_end("a", 5, 2.0)
    assert not made.replicas["d"].num_in_flight


def test_no_such_policy() -> None:
    with pytest.raises(ConfigError, match="kept-promise, prefix-affinity"):
        Router("random")


@given(
    policy=st.sampled_from(list(ROUTING_POLICIES)),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5000), st.floats(0.0, 2.0))),
)
def test_what_has_ended_leaves_nothing_behind(
    policy: str, steps: list[tuple[int, int, float]]
) -> None:
    made, now_s, open_ids = router(policy, *[state()] * 3), 0.0, []
    for n, (kind, num_tokens, passed_s) in enumerate(steps):
        now_s += passed_s
        for replica_id in made.replicas:  # or they would be gone
            made.note_state(replica_id, state(), now_s)
        if kind == 0 or not open_ids:
            made.route(request(str(n), num_tokens, tenant=f"t{num_tokens % 3}"), now_s)
            open_ids.append(str(n))
        elif kind == 1:
            made.note_first_token(open_ids[0], now_s)
        elif kind == 2:
            made.note_end(open_ids.pop(0), num_tokens, now_s)
        else:
            made.note_state("0", state(delay_s=passed_s, itl_s=0.0), now_s)
        assert sum(view.num_in_flight for view in made.replicas.values()) == len(open_ids)
        for view in made.replicas.values():
            assert view.ttft_s("t0", 10, now_s) >= 10 * view.token_s
    for request_id in open_ids:
        made.note_end(request_id, 1, now_s)
    for view in made.replicas.values():
        assert view.num_in_flight == 0
        assert view.ttft_s("t0", 10, now_s + 60.0) == pytest.approx(
            view.itl_s(0) + 10 * view.token_s, rel=1e-6
        )


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_a_replica_that_tells_nothing_is_doubtful_and_then_gone(policy: str) -> None:
    """Replica 0 is the idle one by what it last told."""
    made = router(policy, state(delay_s=0.0), state(delay_s=1.0))

    def places(now_s: float) -> set[str]:
        names = [f"{now_s} {number}" for number in range(4)]
        return {made.route(request(name), now_s).decode for name in names}

    for now_s in (1.0, 2.0, 3.0, 4.0):
        made.note_state("1", state(delay_s=1.0), now_s)
    assert places(4.0) == {"1"}, "doubtful, and there is a fresh one"
    assert not made.may_try_again(["1"], "both", 4.0)
    assert places(8.0), "both are doubtful"
    assert made.is_accepting(19.0)
    assert places(19.0) == {"1"}, "gone"
    assert not made.is_accepting(20.0)
    with pytest.raises(NoReplicaError):
        made.route(request("late"), 20.0)
    made.note_state("0", state(), 21.0)
    assert places(21.0) == {"0"}, "it is there again"


def test_requests_that_wait_at_a_replica_that_is_gone_are_stranded() -> None:
    made = router("round-robin", state(), state())
    for name in "abcd":
        made.route(request(name), 0.0)
    made.note_first_token("c", 1.0)
    made.note_state("1", state(), 10.0)
    assert made.stranded(10.0) == []
    assert made.stranded(16.0) == ["a"]
    assert made.stranded(40.0) == [], "no other would take them"


@given(
    told=st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 30.0)), max_size=12),
    now_s=st.floats(30.0, 50.0),
)
def test_no_request_goes_to_a_staler_replica_than_it_must(
    told: list[tuple[int, float]], now_s: float
) -> None:
    made = router("power-of-two", *[state()] * 3)
    last = [0.0] * 3
    for place, at_s in sorted(told, key=lambda one: one[1]):
        made.note_state(str(place), state(), at_s)
        last[place] = at_s
    try:
        chosen = int(made.route(request("a"), now_s).decode)
    except NoReplicaError:
        assert all(now_s - at_s > 10.0 for at_s in last)
    else:
        assert now_s - last[chosen] <= 15.0
        assert now_s - last[chosen] <= 3.0 or all(now_s - at_s > 3.0 for at_s in last)
