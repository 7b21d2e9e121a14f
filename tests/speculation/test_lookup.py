"""Drafts continue the same tokens as before, from no other tenant's text, in bounded memory."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.token_ids import TokenIds
from legato.speculation import lookup
from legato.speculation.lookup import OwnTokens, RecentOutputs
from legato.speculation.suffix_index import Place, SuffixIndex
from tests.profiles import examples
from tests.speculation.streams import come, proposed, stream

SLICE = lookup._SLICE
MOST_KEPT = lookup._MOST_KEPT
MOST_OWNERS = lookup._MOST_OWNERS
LONG = range(100, 200)
"""More tokens than are compared with guesses when a request is new."""


@pytest.fixture
def own() -> OwnTokens:
    return OwnTokens()


@pytest.fixture
def recent() -> RecentOutputs:
    return RecentOutputs()


def test_what_stood_behind_the_same_tokens(own: OwnTokens) -> None:
    request = stream([1, 2, 3, 4, 5, 6, 7, 8, 9])
    come(request, [1, 2, 3], own)
    assert proposed(own, request, 4) == [4, 5, 6, 7]
    assert proposed(own, request, 1) == [4]
    come(request, [4], own)
    assert proposed(own, request, 3) == [5, 6, 7]
    come(request, [40], own)
    assert proposed(own, request) == []


@given(period=st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), data=st.data())
def test_a_period_goes_on_for_ever(period: list[int], data: st.DataObject) -> None:
    """Beyond the end of the row, too."""
    own, num_tokens = OwnTokens(), data.draw(st.integers(len(period) + 1, 30))
    row = (period * 31)[:num_tokens]
    request = stream(row[:-1])
    come(request, row[-1:], own)
    most = data.draw(st.integers(1, 64))
    assert proposed(own, request, most) == (period * 100)[num_tokens : num_tokens + most]


@given(row=st.lists(st.integers(0, 2), min_size=2, max_size=60), data=st.data())
def test_a_draft_goes_on_as_the_row_did_somewhere(row: list[int], data: st.DataObject) -> None:
    own, num_prompt = OwnTokens(), data.draw(st.integers(1, len(row) - 1))
    request = stream(row[:num_prompt])
    for token_id in row[num_prompt:]:
        come(request, [token_id], own)
        token_ids = list(request.token_ids)
        draft = proposed(own, request, 3)
        whole = token_ids + draft
        last = len(token_ids) - 1
        assert not draft or any(
            token_ids[at] == token_ids[last] and whole[at + 1 : at + 1 + len(draft)] == draft
            for at in range(last)
        )


def test_guesses_that_were_right_are_likelier(own: OwnTokens) -> None:
    request = stream([*LONG, 1, 2, 3, 4, 9, 1, 2, 3])
    come(request, [4], own)
    draft = own.propose(request, 8)
    assert draft is not None
    assert list(draft.chances) == sorted(draft.chances)
    come(request, [9, 1, 2, 3, 4], own)
    later = own.propose(request, 8)
    assert later is not None
    assert later.chances[0] > draft.chances[0]
    come(request, [1, 3, 1, 4, 2, 1, 1, 3, 4, 1, 3], own)
    last = own.propose(request, 8)
    assert last is not None
    assert last.chances[0] < later.chances[0]


def test_a_request_s_own_guesses_tell_most_of_it(own: OwnTokens) -> None:
    periodic, random_one = stream([*LONG, 1, 2, 3], "right"), stream([*LONG, 1, 2, 3], "wrong")
    come(periodic, [1, 2, 3] * 10, own)
    come(random_one, [1, 3, 2, 1, 1, 3, 3, 2, 3, 1, 2, 2, 1, 3, 2, 3, 3, 1, 1, 2], own)
    right, wrong = (own._rows[name][1].luck.chance(0.5) for name in ("right", "wrong"))
    assert right > 0.5
    assert right > wrong + 0.1


def test_one_request_s_guesses_tell_of_another_s(own: OwnTokens) -> None:
    first = stream([*LONG, 1, 2, 3, 4], "first")
    come(first, [1], own)
    before = own.propose(first, 4)
    come(first, [2, 3, 4], own)
    second = stream([*LONG, 1, 2, 3, 4], "second")
    come(second, [1], own)
    after = own.propose(second, 4)
    assert before is not None
    assert after is not None
    assert all(b > a for a, b in zip(before.chances[:3], after.chances[:3], strict=True))
    assert after.chances[3] == before.chances[3]  # nothing was seen of matches so long


def test_a_long_prompt_is_taken_in_by_slices(own: OwnTokens) -> None:
    rng = random.Random(0)
    prompt = rng.choices(range(50_000), k=3 * SLICE)
    request = stream(prompt)
    taken = []
    for token_id in prompt[:5]:
        come(request, [token_id], own)
        taken.append(own._rows["a"][0].num_indexed)
        if taken[-1] < len(request.token_ids):
            assert proposed(own, request) == []
    assert max(b - a for a, b in zip([0, *taken], taken, strict=False)) <= SLICE
    assert proposed(own, request, 3) == prompt[5:8]


def test_who_is_forgotten_leaves_nothing(own: OwnTokens, recent: RecentOutputs) -> None:
    request = stream([1, 2, 1, 2])
    for drafter in (own, recent):
        assert drafter.propose(request, 3) is None  # it is unknown
        drafter.forget(request)
    come(request, [1], own)
    own.forget(request)
    assert not own._rows
    other = stream([5], "b")
    come(other, [6])
    recent.forget(other)
    come(request, [5], recent)
    assert proposed(recent, request) == [6]
    recent.forget(request)
    assert not recent._matches


def ended(drafter: RecentOutputs, request_id: str, output: list[int], **owner: Any) -> None:
    request = stream([0], request_id, **owner)
    come(request, output, drafter)
    drafter.forget(request)


def test_what_came_to_others(recent: RecentOutputs) -> None:
    ended(recent, "before", [1, 2, 3, 4, 5])
    request = stream([7, 8])
    come(request, [1], recent)
    assert proposed(recent, request, 2) == [2, 3]
    come(request, [2, 3, 4], recent)
    assert proposed(recent, request, 9) == [5]
    come(request, [5], recent)
    assert proposed(recent, request) == []


def test_the_end_of_an_output_is_no_guess(recent: RecentOutputs) -> None:
    """Others that went on there do not make what stands before it less likely."""
    ended(recent, "before", [1, 2, 3, 4, 5])
    for i in range(50):
        come(stream([7, 8], f"beyond {i}"), [1, 2, 3, 4, 5, 100 + i], recent)
    request = stream([7, 8])
    come(request, [1], recent)
    draft = recent.propose(request, 9)
    assert draft is not None
    assert list(draft.token_ids) == [2, 3, 4, 5]
    assert min(draft.chances) > 0.9


def test_what_came_first_behind_a_prompt(recent: RecentOutputs) -> None:
    """The prompt's last tokens are kept with the output, so that its beginning is found."""
    first = stream([1, 2, 3, 4, 5, 6])
    come(first, [7, 8], recent)
    recent.forget(first)
    second = stream([3, 4, 5, 6], "b")
    come(second, [7], recent)
    assert proposed(recent, second) == [8]
    third = stream([9], "c")
    come(third, [2], recent)
    assert proposed(recent, third) == []


def test_who_got_nothing_is_not_kept(recent: RecentOutputs) -> None:
    recent.forget(stream([1, 2, 3]))
    assert not recent._stores


owners = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([None, "x", "y"]))


@given(
    outputs=st.lists(
        st.tuples(owners, st.lists(st.integers(0, 3), min_size=1, max_size=12)), max_size=20
    )
)
@examples(60)
def test_nothing_goes_from_owner_to_owner(
    outputs: list[tuple[tuple[str, str | None], list[int]]],
) -> None:
    """Each owner has tokens of its own: those of others never are proposed, nor separators."""
    recent, firsts = RecentOutputs(), dict[tuple[str, str | None], int]()
    for i, (owner, output) in enumerate(outputs):
        first = firsts.setdefault(owner, 4 * len(firsts))
        request = stream([first], str(i), tenant=owner[0], cache_salt=owner[1])
        for token_id in output:
            come(request, [first + token_id], recent)
            assert {t // 4 for t in proposed(recent, request, 20)} <= {first // 4}
        recent.forget(request)


def test_memory_is_bounded(recent: RecentOutputs) -> None:
    rng = random.Random(0)
    for i in range(90):
        ended(recent, str(i), rng.choices(range(1000), k=1000))
    [store] = recent._stores.values()
    assert MOST_KEPT // 2 < len(store.token_ids) <= MOST_KEPT + 1000 + 5
    for i in range(MOST_OWNERS):
        ended(recent, f"of {i}", [1, 2, 3], tenant=f"tenant {i}")
    assert len(recent._stores) == MOST_OWNERS
    assert ("default", None) not in recent._stores, "the one that none came to for longest"


def test_of_a_long_output_the_end_is_kept(recent: RecentOutputs) -> None:
    ended(recent, "long", [*range(3 * MOST_KEPT)])
    [store] = recent._stores.values()
    assert len(store.token_ids) == MOST_KEPT + 1
    request = stream([0])
    come(request, [3 * MOST_KEPT - 3], recent)
    assert proposed(recent, request) == [3 * MOST_KEPT - 2, 3 * MOST_KEPT - 1]


def test_what_was_kept_last_stays(recent: RecentOutputs) -> None:
    """Half of the tokens are dropped when there are too many, and others' drafts go on."""
    ended(recent, "first", [1, 2, 3, 4, 5, 6])
    request = stream([0])
    come(request, [1, 2], recent)
    filler = list(range(100, 100 + MOST_KEPT // 2))
    ended(recent, "filler", filler)
    ended(recent, "filler too", filler)
    ended(recent, "last", [11, 12, 13])
    ended(recent, "over", [21, 22, 23])
    come(request, [3], recent)
    assert proposed(recent, request, 2) == [4, 5]
    other = stream([0], "other")
    come(other, [1], recent)
    assert proposed(recent, other) == []
    come(other, [11], recent)
    assert proposed(recent, other, 2) == [12, 13]
    come(other, [21], recent)
    assert proposed(recent, other, 2) == [22, 23]


def test_a_long_stream_is_followed_from_its_last_tokens(
    recent: RecentOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any request had ended, there was nothing to look up."""
    request = stream([0])
    come(request, range(5000), recent)
    ended(recent, "first", [4998, 4999, 7])
    num_looks, find = 0, SuffixIndex.find

    def counted(index: SuffixIndex, token_ids: TokenIds, end: int) -> Place | None:
        nonlocal num_looks
        num_looks += 1
        return find(index, token_ids, end)

    monkeypatch.setattr(SuffixIndex, "find", counted)
    recent.advance(request)
    assert 0 < num_looks <= 65
    assert proposed(recent, request) == [7]


@pytest.mark.parametrize("make", [OwnTokens, RecentOutputs])
def test_it_makes_no_difference_how_many_tokens_come_at_once(
    make: type[OwnTokens] | type[RecentOutputs],
) -> None:
    """As many as drafts can make them: they are followed one by one all the same."""
    rng = random.Random(0)
    output = rng.choices(range(3), k=65)

    def after(*, at_once: bool) -> tuple[list[int], list[float]]:
        drafter = make()
        before, request = stream([0], "before"), stream([1, 2] * 3)
        come(before, rng_output, drafter)
        drafter.forget(before)
        come(request, [1], drafter)
        come(request, output, None if at_once else drafter)
        if at_once:
            drafter.advance(request)
        draft = drafter.propose(request, 5)
        assert draft is not None
        return list(draft.token_ids), list(draft.chances)

    rng_output = rng.choices(range(3), k=100)
    assert after(at_once=True) == after(at_once=False)


def test_kinds_are_ordered_by_how_likely_they_are() -> None:
    kinds = [lookup.kind_of(length) for length in range(1, 100)]
    assert kinds[0] == 0
    assert kinds == sorted(kinds)
    assert set(kinds) == set(range(len(lookup._PRIORS)))
