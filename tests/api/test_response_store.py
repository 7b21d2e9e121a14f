"""Stored responses: the bounds hold, and no tenant loses what is within its equal share."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from legato.api.http.errors import ApiError
from legato.api.responses.store import ResponseStore, StoredResponse

_MAX_RESPONSES, _MAX_BYTES = 6, 60

puts = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(1, 70)), max_size=40)


def is_kept(store: ResponseStore, tenant: str | None, response_id: str) -> bool:
    try:
        store.get(tenant, response_id)
    except ApiError:
        return False
    return True


@given(puts)
def test_who_has_no_more_than_an_equal_share_loses_nothing(
    came: list[tuple[str | None, int]],
) -> None:
    store = ResponseStore(_MAX_RESPONSES, _MAX_BYTES, max_body_bytes=1)
    put: defaultdict[str | None, dict[str, int]] = defaultdict(dict)
    for index, (tenant, num_bytes) in enumerate(came):
        response = StoredResponse(f"resp_{index}", [b"x" * num_bytes], (), None)
        put[tenant][response.id] = num_bytes
        was_kept = store.put(tenant, response)
        assert was_kept == is_kept(store, tenant, response.id)
        kept = [
            size
            for owner, sizes in put.items()
            for one, size in sizes.items()
            if is_kept(store, owner, one)
        ]
        assert len(kept) <= _MAX_RESPONSES
        assert sum(kept) <= _MAX_BYTES
        for owner, sizes in put.items():
            if len(sizes) <= _MAX_RESPONSES // 3 and sum(sizes.values()) <= _MAX_BYTES // 3:
                assert all(is_kept(store, owner, one) for one in sizes)
