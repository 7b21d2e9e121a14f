"""Whose cached blocks are whose."""

from hypothesis import given
from hypothesis import strategies as st

from legato.core.block_hash import ROOT, block_hashes
from legato.core.cache_salt import cache_salt, hash_root
from legato.core.slo import ServiceParams

OWNERS = st.none() | st.from_regex(r"[a-z.:@-]{1,3}", fullmatch=True)
SALTS = st.none() | st.text(min_size=1, max_size=3)
PAIRS = st.tuples(OWNERS, SALTS)


@given(pairs=st.lists(PAIRS, min_size=2, max_size=2))
def test_prompts_share_blocks_only_with_the_same_owner_and_salt(
    pairs: list[tuple[str | None, str | None]],
) -> None:
    one, other = pairs
    assert (cache_salt(*one) == cache_salt(*other)) == (one == other)
    roots = [hash_root(cache_salt(*pair)) for pair in pairs]
    for root, (owner, own) in zip(roots, pairs, strict=True):
        assert (root is None) == (own is not None), "a client's salt makes blocks private"
        assert (root == ROOT) == (owner is None and own is None)
    if None not in roots:
        assert (roots[0] == roots[1]) == (one == other)


def test_a_router_sees_other_hashes_for_other_tenants() -> None:
    prompt, names = list(range(64)), ("lab", "ops", None)
    services = [ServiceParams().of_key(name, name) for name in names]
    roots = [hash_root(service.block_salt) for service in services]
    found = {tuple(block_hashes(prompt, 32, parent=root or b"")) for root in roots}
    assert len(found) == len(names)


def test_a_key_decides_who_owns_the_blocks_not_the_body() -> None:
    service = ServiceParams(tenant="lab", cache_salt="a")
    assert service.of_key(None) == service
    assert service.of_key("lab").block_salt == b"a"
    assert service.of_key("lab", "lab").block_salt == cache_salt("lab", "a")
