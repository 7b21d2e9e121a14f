"""Which replicas have which blocks, beside a model that keeps prompts as they are."""

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from legato.core.block_hash import block_hashes
from legato.core.token_ids import token_array
from legato_fleet.routing.prefix_index import PrefixIndex
from tests.profiles import examples

BLOCK = 2
_replica = st.sampled_from("abc")
_prompt = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def hashes(prompt: Sequence[int]) -> list[bytes]:
    return block_hashes(token_array(prompt), BLOCK)


def prefixes(prompt: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)}


class Index(RuleBasedStateMachine):
    """Replicas keep whole prompts or ends of them less, as caches do.

    Replica "c" uses a prompt up to certain blocks alone, unless it is about to compute it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[str, set[tuple[int, ...]]] = {one: set() for one in "abc"}
        self.ends: set[tuple[int, ...]] = set()
        self.index.change_ends("c", [], [])
        self.sent: list[tuple[str, list[int]]] = []

    @rule(replica=_replica, prompt=_prompt)
    def store(self, replica: str, prompt: list[int]) -> None:
        self.index.store(replica, hashes(prompt))
        self.held[replica] |= prefixes(prompt)

    @rule(replica=_replica, prompt=_prompt)
    def remove_all_that_begin_so(self, replica: str, prompt: list[int]) -> None:
        start = tuple(prompt[: len(prompt) // BLOCK * BLOCK])
        gone = {one for one in self.held[replica] if one[: len(start)] == start} if start else set()
        if replica == "c":
            self.change_ends([], sorted(gone & self.ends))
        self.index.remove(replica, [hashes(one)[-1] for one in gone])
        self.held[replica] -= gone

    @rule(replica=_replica)
    def clear(self, replica: str) -> None:
        self.index.clear(replica)
        self.held[replica].clear()
        if replica == "c":
            self.ends.clear()
            self.index.change_ends("c", [], [])
        self.sent = [(one, prompt) for one, prompt in self.sent if one != replica]

    @rule(replica=_replica, prompt=_prompt)
    def send(self, replica: str, prompt: list[int]) -> None:
        here = [prefixes(sent) for one, sent in self.sent if one == replica]
        if prefixes(prompt).isdisjoint(set().union(*here)):
            self.index.expect(replica, hashes(prompt))
            self.sent.append((replica, prompt))

    @precondition(lambda self: self.held["c"])
    @rule(data=st.data(), removes=st.booleans())
    def change_an_end(self, data: st.DataObject, removes: bool) -> None:
        prompt = data.draw(st.sampled_from(sorted(self.held["c"])))
        if removes is (prompt in self.ends):
            self.change_ends([] if removes else [prompt], [prompt] if removes else [])

    def change_ends(self, added: list[tuple[int, ...]], removed: list[tuple[int, ...]]) -> None:
        self.ends = (self.ends | {*added}) - {*removed}
        names = [[hashes(one)[-1] for one in part] for part in (added, removed)]
        self.index.change_ends("c", *names)

    @rule()
    def end(self) -> None:
        if self.sent:
            replica, prompt = self.sent.pop()
            self.index.expect_no_longer(replica, hashes(prompt))

    @invariant()
    def it_says_what_each_has_and_is_about_to(self) -> None:
        for prompt in ([0] * 12, [1] * 12, [0, 1] * 6, [0, 0, 1, 1] * 3):
            expected = {
                replica: length
                for replica in self.held
                if (length := self._num_blocks(replica, prompt))
            }
            assert self.index.num_cached_blocks(hashes(prompt)) == expected

    @invariant()
    def it_forgets_what_nobody_has(self) -> None:
        known = set().union(*self.held.values(), *(prefixes(p) for _, p in self.sent))
        assert len(self.index) == len(known)

    def _num_blocks(self, replica: str, prompt: list[int]) -> int:
        here = set().union(*(prefixes(sent) for one, sent in self.sent if one == replica))
        length = usable = 0
        while length * BLOCK < 12:
            length += 1
            block = tuple(prompt[: length * BLOCK])
            if block not in self.held[replica] | here:
                break
            if replica != "c" or block in self.ends | here:
                usable = length
        return usable


TestIndex = Index.TestCase
TestIndex.settings = examples(60, stateful_step_count=30)
