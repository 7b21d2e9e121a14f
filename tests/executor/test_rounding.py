"""Keys and values in 8 bits: how far from what they were, on random rows and on a whole model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.executor.attention.rounding import dequantize, mix, quantize
from tests.executor.backends import EXACT, NATIVE, QUANTIZED, Backend, params
from tests.executor.by_hand import prompt, run_by_hand
from tests.profiles import examples

ROWS = st.lists(
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=4, max_size=4),
    min_size=1,
    max_size=4,
)


@given(ROWS)
@examples(200)
def test_within_half_a_scale(rows: list[list[float]]) -> None:
    """Zeros, the smallest numbers and the largest among them."""
    values = torch.tensor(rows)
    codes, scales = quantize(values)
    assert int(codes.min()) >= -127
    assert bool(scales.isfinite().all())
    error = (dequantize(codes, scales, torch.float64) - values.double()).abs()
    allowed = 0.5001 * scales.double().unsqueeze(-1) + 1e-30
    assert bool((error <= allowed).all())


@given(ROWS, st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.integers(0, 3))
@examples(50)
def test_what_is_not_finite_stays_so(rows: list[list[float]], value: float, place: int) -> None:
    values = torch.tensor(rows)
    values[0, place] = value
    seen = dequantize(*quantize(values), torch.float32)
    assert not seen[0].isfinite().any()
    assert seen[1:].isfinite().all()


@given(st.integers(1, 300), st.integers(0, 2**31))
@examples(100)
def test_mixing_is_a_rotation_that_undoes_itself(head_dim: int, seed: int) -> None:
    """Scores are those of plain heads, and results become plain again."""
    random = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, 3, head_dim, generator=random)
    torch.testing.assert_close(mix(mix(key)), key, rtol=0.0, atol=2e-5)
    scores = (mix(query) * mix(key)).sum(-1)
    torch.testing.assert_close(scores, (query * key).sum(-1), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("head_dim", "most"), [(64, 0.126), (80, 0.151), (96, 0.118), (128, 0.089), (256, 0.063)]
)
def test_mixing_spreads_each_channel(head_dim: int, most: float) -> None:
    assert float(mix(torch.eye(head_dim)).abs().max()) <= most


PAIRS = {backend.kernels: backend for backend in QUANTIZED}


def prompt_scores(backend: Backend) -> torch.Tensor:
    """Logits of 250 tokens; some come in chunks and others one by one."""
    hand, _ = run_by_hand(backend)
    stream = hand.add("a", prompt(250), prompt_logprobs=0)
    for count in (100, 1, 1, 33, 115):
        hand.step(a=count)
    return torch.tensor([entry.logprob for entry in stream.prompt_logprobs])


@pytest.mark.parametrize("backend", params([EXACT, *NATIVE]))
def test_little_is_lost(backend: Backend) -> None:
    """A cache of 8 bits adds less to the scores' error than bfloat16 arithmetic does."""
    exact, plain = prompt_scores(EXACT), prompt_scores(backend)
    quantized = prompt_scores(PAIRS[backend.kernels])
    assert not torch.equal(quantized, plain)
    assert float((quantized - exact).abs().mean()) < 0.02
    assert float((quantized - plain).abs().mean()) < 0.02


@pytest.mark.parametrize("backend", params(NATIVE))
def test_kernels_agree(backend: Backend) -> None:
    """On what the cache holds: their errors are those of bfloat16, not of the codes."""
    reference = prompt_scores(PAIRS[EXACT.kernels])
    ours, plain = prompt_scores(PAIRS[backend.kernels]), prompt_scores(backend)
    allowed = (plain - prompt_scores(EXACT)).abs()
    error = (ours - reference).abs()
    assert float(error.mean()) <= 1.5 * float(allowed.mean()) + 1e-3


@pytest.mark.parametrize("backend", params(QUANTIZED))
def test_wherever_the_blocks_went(backend: Backend) -> None:
    """Swapped out and in, or beside others, a stream gets the tokens that it gets alone."""
    alone, _ = run_by_hand(backend)
    expected = alone.add("a", prompt(80), logprobs=0)
    alone.step(a=80)
    alone.finish()
    hand, _ = run_by_hand(backend)
    a = hand.add("a", prompt(80), logprobs=0)
    hand.step(a=80)
    hand.swap_out("a")
    hand.add("b", prompt(200, salt=1))
    hand.step(b=200)
    hand.swap_in("a")
    hand.step(a=1, b=1)
    hand.preempt("b")
    hand.finish()
    assert a.output == expected.output
