"""Names of blocks, which are vLLM's."""

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from legato.core.block_hash import ROOT, block_hash, block_hashes
from tests.profiles import examples

# One token id of each length that CBOR has for them, and around where one ends.
TOKEN_IDS = [0, 23, 24, 255, 256, 65535, 65536, 128255, 1, 2, 3, 4, 5, 6, 7, 9]
# By hashlib and cbor2's canonical encoding of (parent, tokens, None), as vLLM has it.
NAMES = [
    "c0583c6925fe76cdf29b9430614ca49b8b76309b8e773200c126336d8bfdfd1e",
    "f3ad3b62666308945ae47ae407c903ef82f6b07fb47c14fc3b1bec7b993378f1",
]


def test_names_are_those_of_vllm() -> None:
    assert sha256(b"\x610").digest() == ROOT, "the text 0 in CBOR"
    assert [name.hex() for name in block_hashes(TOKEN_IDS, 8)] == NAMES


def test_a_block_that_is_not_full_has_no_name() -> None:
    assert block_hashes(TOKEN_IDS[:7], 8) == []
    assert block_hashes([*TOKEN_IDS, 1], 8) == block_hashes(TOKEN_IDS, 8)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=24), st.integers(1, 4))
@examples(30)
def test_a_name_stands_for_all_tokens_before_it(token_ids: list[int], size: int) -> None:
    names = block_hashes(token_ids, size)
    assert names[-1] == block_hash(
        ([ROOT, *names])[-2], token_ids[(len(names) - 1) * size : len(names) * size]
    )
    token_ids[0] ^= 1
    assert not set(names) & set(block_hashes(token_ids, size))
