"""The tree of shared blocks, by itself."""

import pytest

from legato.kv.host_pool import HostPool
from legato.kv.prefix_node import Key, Node
from legato.kv.prefix_tree import PrefixTree

TOKENS_A, TOKENS_B, TOKENS_C = b"12", b"34", b"56"


class SameHash(bytes):
    def __hash__(self) -> int:
        return 1


def grown(tree: PrefixTree, *keys: Key) -> list[Node]:
    """A way of computed blocks, used once; block ids count up from 0 in each."""
    path: list[Node] = []
    tree.extend(path, keys, range(len(keys)), num_missing=0)
    return path


def test_equal_hashes_are_no_hit() -> None:
    tree = PrefixTree(HostPool(0))
    key, other = SameHash(TOKENS_A), SameHash(TOKENS_B)
    grown(tree, key)
    assert tree.match([key])
    assert not tree.match([other])


def test_the_same_tokens_elsewhere_are_another_block() -> None:
    tree = PrefixTree(HostPool(0))
    grown(tree, TOKENS_A, TOKENS_B)
    assert [node.block_id for node in tree.match([TOKENS_A, TOKENS_B])] == [0, 1]
    assert not tree.match([TOKENS_B])
    assert len(tree.match([TOKENS_A, TOKENS_A])) == 1


def test_a_block_has_one_place() -> None:
    tree = PrefixTree(HostPool(0))
    grown(tree, TOKENS_A)
    with pytest.raises(AssertionError, match="same tokens"):
        grown(tree, TOKENS_A)


def test_evicts_the_deepest_of_what_was_used_longest_ago() -> None:
    tree = PrefixTree(HostPool(0))
    path = grown(tree, TOKENS_A, TOKENS_B, TOKENS_C)
    assert tree.num_unused == 0
    tree.release(path)
    tree.use(path[:1])
    tree.release(path[:1])
    assert tree.evict(2) == [2, 1]
    assert tree.match([TOKENS_A, TOKENS_B]) == path[:1]


def test_what_is_not_computed_goes_with_its_last_user() -> None:
    tree = PrefixTree(HostPool(0))
    path = grown(tree, TOKENS_A)
    tree.extend(path, [TOKENS_B, TOKENS_C], [8, 9], num_missing=2)
    tree.use(path)
    assert tree.release(path) == []
    assert tree.release(path) == [9, 8]
    assert tree.num_unused == 1
    assert tree.match([TOKENS_A, TOKENS_B]) == path[:1]
