"""The two ends of an embedding: the tokens that are kept, and the vector that is returned."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.errors import InvalidRequestError
from legato.language.embedding import check_dimensions, finished_embedding, kept_tokens

BEGIN, END = [1000], [2000, 2001]


@given(
    bare=st.lists(st.integers(0, 9), max_size=20),
    begin=st.sampled_from([[], BEGIN]),
    end=st.sampled_from([[], END]),
    count=st.integers(1, 30),
    side=st.sampled_from(["left", "right"]),
)
def test_special_tokens_stay_around_a_truncated_text(
    bare: list[int], begin: list[int], end: list[int], count: int, side: str
) -> None:
    whole = [*begin, *bare, *end]
    kept = list(kept_tokens(whole, bare, count, side, 30))  # type: ignore[arg-type]
    assert len(kept) == min(len(whole), count)
    num_added = len(begin) + len(end)
    if count > num_added:
        inner = kept[len(begin) : len(kept) - len(end)]
        assert kept == [*begin, *inner, *end]
        assert inner == (bare[: len(inner)] if side == "right" else bare[len(bare) - len(inner) :])
    assert kept_tokens(whole, bare, None, "right", 1) == whole


def test_minus_one_keeps_the_context() -> None:
    ids = list(range(10))
    assert kept_tokens(ids, ids, -1, "right", 4) == [0, 1, 2, 3]
    assert kept_tokens(ids, ids, -1, "left", 4) == [6, 7, 8, 9]
    with pytest.raises(InvalidRequestError, match="more than the model's context of 4 tokens"):
        kept_tokens(ids, ids, 5, "right", 4)


def test_dimensions_are_cut_before_the_length_becomes_1() -> None:
    pooled = np.array([3, 4, 12], np.float32).tobytes()
    cut = finished_embedding(pooled, dimensions=2, normalize=True)
    np.testing.assert_allclose(cut, [0.6, 0.8], rtol=1e-6)
    whole = finished_embedding(pooled, dimensions=None, normalize=False)
    assert whole.tolist() == [3, 4, 12]
    zero = np.zeros(2, np.float32).tobytes()
    assert finished_embedding(zero, dimensions=None, normalize=True).tolist() == [0, 0]


@pytest.mark.parametrize("dimensions", [0, -1, 9])
def test_impossible_dimensions(dimensions: int) -> None:
    with pytest.raises(InvalidRequestError, match="between 1 and 8"):
        check_dimensions(dimensions, 8)
