"""The random numbers and the inverse of the cumulative distribution."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from legato.executor.draw import pick, to_weights, uniform_numbers

LAST = 1.0 - 2.0**-53
"""The greatest number that `uniform_numbers` returns."""


def splitmix64(bits: int) -> int:
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return bits ^ (bits >> 31)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("position", [0, 1, 3000])
def test_is_splitmix64_of_the_seed_and_the_position(seed: int, position: int) -> None:
    start = splitmix64(seed % 2**64)
    bits = splitmix64((start + (position + 1) * 0x9E3779B97F4A7C15) % 2**64)
    (number,) = uniform_numbers(np.array([seed]), np.array([position])).tolist()
    assert number == (bits >> 11) / 2**53


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    numbers = np.stack(
        [uniform_numbers(np.arange(2000), np.full(2000, position)) for position in range(4)]
    )
    pairs = [
        (numbers[:-1], numbers[1:]),
        (numbers[:, :-1], numbers[:, 1:]),
        (numbers[:-1, :-1], numbers[1:, 1:]),
        (numbers[:-1, 1:], numbers[1:, :-1]),
    ]
    for a, b in pairs:
        counts, _, _ = np.histogram2d(a.ravel(), b.ravel(), bins=8, range=[[0, 1], [0, 1]])
        assert stats.chisquare(counts.ravel()).pvalue > 1e-3


@given(
    st.lists(st.integers(0, 2**20), min_size=1, max_size=300).filter(any),
    st.floats(0.0, 1.0).map(lambda u: min(np.floor(u * 2**53) / 2**53, LAST)),
)
def test_never_picks_a_weight_of_zero(weights: list[int], uniform: float) -> None:
    token = pick(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64)).item()
    assert weights[int(token)] > 0
    point = int(uniform * sum(weights))
    assert sum(weights[: int(token)]) <= point < sum(weights[: int(token) + 1])


@pytest.mark.parametrize("vocab_size", [1, 2, 32_768, 49_152, 262_144])
def test_edges_of_the_largest_sums(vocab_size: int) -> None:
    """All tokens equally likely: the sum is as large as it gets, and still exact."""
    weights = to_weights(torch.zeros(2, vocab_size))
    assert int(weights.sum(dim=-1)[0]) < 2**53
    edges = torch.tensor([0.0, LAST], dtype=torch.float64)
    assert pick(weights, edges).tolist() == [0, vocab_size - 1]


def test_weights_are_powers_of_two() -> None:
    scores = torch.tensor([[0.0, -1.0, -10.0, -200.0, float("-inf")]])
    (weights,) = to_weights(scores).tolist()
    assert [weight / weights[0] for weight in weights] == [1.0, 0.5, 2.0**-10, 0.0, 0.0]
