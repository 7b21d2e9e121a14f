"""Which replicas have which blocks, beside a model that keeps prompts as they are."""

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from legato.core.block_hash import block_hashes
from legato.core.token_ids import token_array
from legato.routing.prefix_index import PrefixIndex
from tests.profiles import examples

BLOCK = 2
_replica = st.sampled_from("abc")
_prompt = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def hashes(prompt: Sequence[int]) -> list[bytes]:
    return block_hashes(token_array(prompt), BLOCK)


def prefixes(prompt: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)}


class Index(RuleBasedStateMachine):
    """Replicas keep whole prompts or ends of them less, as caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[str, set[tuple[int, ...]]] = {one: set() for one in "abc"}
        self.sent: list[tuple[str, list[int]]] = []

    @rule(replica=_replica, prompt=_prompt)
    def store(self, replica: str, prompt: list[int]) -> None:
        self.index.store(replica, hashes(prompt))
        self.held[replica] |= prefixes(prompt)

    @rule(replica=_replica, prompt=_prompt)
    def remove_all_that_begin_so(self, replica: str, prompt: list[int]) -> None:
        start = tuple(prompt[: len(prompt) // BLOCK * BLOCK])
        gone = {one for one in self.held[replica] if one[: len(start)] == start} if start else set()
        self.index.remove(replica, [hashes(one)[-1] for one in gone])
        self.held[replica] -= gone

    @rule(replica=_replica)
    def clear(self, replica: str) -> None:
        self.index.clear(replica)
        self.held[replica].clear()
        self.sent = [(one, prompt) for one, prompt in self.sent if one != replica]

    @rule(replica=_replica, prompt=_prompt)
    def send(self, replica: str, prompt: list[int]) -> None:
        here = [prefixes(sent) for one, sent in self.sent if one == replica]
        if prefixes(prompt).isdisjoint(set().union(*here)):
            self.index.expect(replica, hashes(prompt))
            self.sent.append((replica, prompt))

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
        here = [prefixes(sent) for one, sent in self.sent if one == replica]
        known = self.held[replica].union(*here)
        length = 0
        while tuple(prompt[: (length + 1) * BLOCK]) in known and (length + 1) * BLOCK <= 12:
            length += 1
        return length


TestIndex = Index.TestCase
TestIndex.settings = examples(60, stateful_step_count=30)
