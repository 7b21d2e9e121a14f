"""The tree of shared blocks, by itself."""

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from legato.core.token_ids import token_array
from legato.kv.block_ids import block_array
from legato.kv.host_cache_slots import HostCacheSlots
from legato.kv.prefix_node import Key, Node, SoughtTokens, Way
from legato.kv.prefix_tree import PrefixTree
from tests.profiles import examples

BLOCK_SIZE = 2
A, B, C = [1, 2], [3, 4], [5, 6]


class SameHash(bytes):
    def __hash__(self) -> int:
        return 1


class HashedAlike(SoughtTokens):
    def key(self, start: int) -> Key:
        return SameHash(super().key(start))


def sought(*blocks: Sequence[int]) -> SoughtTokens:
    return SoughtTokens(token_array(t for block in blocks for t in block), BLOCK_SIZE)


def matched(tree: PrefixTree, tokens: SoughtTokens) -> list[int]:
    """Where the blocks lie that are found."""
    way = tree.match(tokens, len(tokens.token_ids))
    places = [place for node in way.nodes for place in node.places]
    return places[: way.num_tokens // BLOCK_SIZE]


def grown(
    tree: PrefixTree, tokens: SoughtTokens, *, below: Node | None = None, num_missing: int = 0
) -> Node:
    """Blocks of all tokens, used once; their ids count up from 0."""
    below = below or tree.root
    block_ids = range(below.end // BLOCK_SIZE, len(tokens.token_ids) // BLOCK_SIZE)
    return tree.extend(below, tokens, block_array(block_ids), num_missing=num_missing)


def test_equal_hashes_are_no_hit() -> None:
    tree = PrefixTree(HostCacheSlots(0))
    tokens, others = (HashedAlike(token_array(t), BLOCK_SIZE) for t in (A, B))
    grown(tree, tokens)
    assert matched(tree, tokens)
    assert not matched(tree, others)


def test_the_same_tokens_elsewhere_are_another_block() -> None:
    tree = PrefixTree(HostCacheSlots(0))
    grown(tree, sought(A, B))
    assert matched(tree, sought(A, B)) == [0, 1]
    assert matched(tree, sought(B)) == []
    assert matched(tree, sought(A, A)) == [0]


def test_a_block_has_one_place() -> None:
    tree = PrefixTree(HostCacheSlots(0))
    grown(tree, sought(A))
    with pytest.raises(AssertionError, match="same tokens"):
        grown(tree, sought(A))


def test_who_uses_a_part_of_a_node_splits_it() -> None:
    tree = PrefixTree(HostCacheSlots(0))
    whole = grown(tree, sought(A, B, C))
    [part] = tree.use(tree.match(sought(A, A), 4))
    assert (part.num_users, whole.num_users) == (2, 1)
    assert whole.parent is part
    assert matched(tree, sought(A, B, C)) == [0, 1, 2]
    other = grown(tree, sought(A, A), below=part)
    assert other.parent is part


def test_a_node_grows_while_one_uses_it_alone() -> None:
    tree = PrefixTree(HostCacheSlots(0))
    first = grown(tree, sought(A))
    assert grown(tree, sought(A, B), below=first) is first
    tree.use(tree.match(sought(A, B), 4))
    assert grown(tree, sought(A, B, C), below=first) is not first


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 8])
def test_a_way_ends_where_the_tokens_come_to_differ(num_blocks: int) -> None:
    tree = PrefixTree(HostCacheSlots(0))
    tokens = [[i, i] for i in range(8)]
    grown(tree, sought(*tokens))
    others = sought(*tokens[:num_blocks], *([9, 9] for _ in tokens[num_blocks:]))
    assert matched(tree, others) == [*range(num_blocks)]


def test_evicts_the_deepest_of_what_was_used_longest_ago() -> None:
    tree = PrefixTree(HostCacheSlots(0))
    last = grown(tree, sought(A, B, C))
    assert tree.num_unused == 0
    tree.release(last)
    [part] = tree.use(tree.match(sought(A), 2))
    tree.release(part)
    assert tree.evict(2) == [2, 1]
    assert matched(tree, sought(A, B)) == [0]


def test_a_known_way_is_no_longer_trusted_where_it_was_cut() -> None:
    """The end of the first node was evicted with the second one, and grew again otherwise."""
    tree = PrefixTree(HostCacheSlots(0))
    first = grown(tree, sought(A, B))
    other = tree.use(tree.match(sought(A, B), 4))[-1]
    last = grown(tree, sought(A, B, C), below=first)
    known = tree.match(sought(A, B, C), 6)
    assert [node.end for node in known.nodes] == [4, 6]
    tree.release(last)
    tree.release(other)
    tree.evict(2)
    [part] = tree.use(tree.match(sought(A), 2))
    assert part is first
    grown(tree, sought(A, C, B), below=part)
    found = tree.match(sought(A, B, C), 6, known=known)
    assert found == tree.match(sought(A, B, C), 6)
    assert found.num_tokens == 2


def test_what_is_not_computed_goes_with_its_last_user() -> None:
    tree = PrefixTree(HostCacheSlots(0))
    first = grown(tree, sought(A))
    last = grown(tree, sought(A, B, C), below=first, num_missing=BLOCK_SIZE)
    tree.use(tree.match(sought(A, B, C), 6))
    assert tree.release(last) == []
    assert tree.release(last) == [2, 1]
    assert tree.num_unused == 1
    assert matched(tree, sought(A, B)) == [0]


class TreeMachine(RuleBasedStateMachine):
    """The tree beside one whose nodes are blocks: the same are found, and evicted in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(HostCacheSlots(0))
        self.blocks: dict[tuple[int, ...], int] = {}  # key all tokens up to its end, value its id
        self.users: list[tuple[Node, tuple[int, ...]]] = []
        self.unused: dict[tuple[int, ...], None] = {}  # the next to be evicted first
        self.num_made = 0
        self.known: list[tuple[SoughtTokens, Way]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=4, max_size=12))
    def look_up(self, tokens: list[int]) -> None:
        spelled = sought(tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE])
        way = self.tree.match(spelled, len(spelled.token_ids))
        self.known = [(spelled, way), *self.known[:5]]

    @precondition(lambda self: self.known)
    @rule(place=st.integers(0, 5), num_blocks=st.integers(0, 6))
    def look_up_again(self, place: int, num_blocks: int) -> None:
        spelled, way = self.known[place % len(self.known)]
        end = min(num_blocks * BLOCK_SIZE, len(spelled.token_ids))
        found = self.tree.match(spelled, end, known=way)
        assert found == self.tree.match(spelled, end)
        self.known[place % len(self.known)] = spelled, found

    @rule(tokens=st.lists(st.integers(0, 1), max_size=12))
    def use(self, tokens: list[int]) -> None:
        tokens = tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE]
        spelled = sought(tokens)
        way = self.tree.match(spelled, len(tokens))
        ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
        found = [self.blocks[key] for e in ends if (key := tuple(tokens[:e])) in self.blocks]
        assert matched(self.tree, spelled) == found
        last = [self.tree.root, *self.tree.use(way)][-1]
        for end in ends:
            self.unused.pop(tuple(tokens[:end]), None)
        new = ends[len(found) :]
        if new:
            made = range(self.num_made, self.num_made + len(new))
            self.num_made += len(new)
            last = self.tree.extend(last, spelled, block_array(made), num_missing=0)
            self.blocks |= {tuple(tokens[:e]): b for e, b in zip(new, made, strict=True)}
        self.users.append((last, tuple(tokens)))

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        last, tokens = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        assert self.tree.release(last) == []
        for end in range(len(tokens), 0, -BLOCK_SIZE):
            if not any(other[:end] == tokens[:end] for _, other in self.users):
                self.unused[tokens[:end]] = None

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        first = [*self.unused][:count]
        assert self.tree.evict(len(first)) == [self.blocks.pop(key) for key in first]
        for key in first:
            del self.unused[key]

    @invariant()
    def the_unused_are_counted(self) -> None:
        assert self.tree.num_unused == len(self.unused)


TestTree = TreeMachine.TestCase
TestTree.settings = examples(100, stateful_step_count=40)
