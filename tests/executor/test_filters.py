"""What min_p, top_k and top_p keep, against a plain float64 account of it."""

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from legato.core.sampling_params import Filters, SamplingParams
from legato.executor.draw import to_scores, to_weights
from legato.executor.sampler import lowest_kept
from tests.executor.sampling_reference import kept
from tests.profiles import examples

MARGIN = 1e-5
"""Nearer to a border than this, float32 may decide otherwise."""


@given(
    seed=st.integers(0, 2**16),
    vocab_size=st.sampled_from([2, 30, 700]),
    scale=st.sampled_from([0.5, 3.0]),
    rounded=st.booleans(),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 20, 650, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
@examples(200)
def test_keeps_the_same_tokens(
    seed: int, vocab_size: int, scale: float, rounded: bool, **values: float
) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    logits = logits.round() if rounded else logits
    params = SamplingParams(**values, seed=0)
    expected = kept(logits.double().numpy(), params)
    assume(not is_close_call(logits.double().numpy(), params))
    scores = to_scores(logits[None].clone(), logits.max()[None], [params.temperature])
    weights = to_weights(scores)
    possible = weights > 0
    actual = possible & (scores >= lowest_kept(scores, weights, [params.draw.filters]))
    assert actual[0].tolist() == (possible[0].numpy() & expected).tolist()


def test_tokens_that_tie_for_the_last_place_count_towards_top_p() -> None:
    """Of 2 : 1 : 1 : 1, top_k = 2 leaves all, and the first has only 40 percent."""
    scores = torch.tensor([[1.0, 0.0, 0.0, 0.0]]) - 1.0
    filters = [Filters(top_p, top_k=2, min_p=0.0) for top_p in (0.39, 0.41)]
    scores = scores.repeat(2, 1)
    assert lowest_kept(scores, to_weights(scores), filters).tolist() == [[0.0], [-1.0]]


def is_close_call(logits: np.ndarray, params: SamplingParams) -> bool:
    """Whether slightly other limits would keep other tokens."""
    nudged = [
        structs.replace(params, **{name: min(1.0, getattr(params, name) * (1 + nudge))})
        for name in ("top_p", "min_p")
        for nudge in (-MARGIN, MARGIN)
        if getattr(params, name) < 1.0
    ]
    return len({kept(logits, p).tobytes() for p in [params, *nudged]}) > 1
