"""Sampled tokens against their exact distribution; rows against themselves in other company."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from legato.core.sampling_params import SamplingParams
from legato.executor.sampler import NO_TOKEN, sample
from legato.executor.sequence import SamplingRow, TokenLimits
from tests.executor.sampling_reference import adjusted, distribution, make_row
from tests.profiles import examples

NUM_DRAWS = 8_000
INF = float("inf")

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 8, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    {"logit_bias": {0: 2.0, 39: -100.0, 7: 1.5}},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 1.7, "presence_penalty": 0.3, "frequency_penalty": -0.8, "top_p": 0.9},
    {"repetition_penalty": 1.7, "logit_bias": {2: 1.5, 6: -1.5}},
    {"min_tokens": 7, "stop_token_ids": (3, 4)},
    {"min_tokens": 6, "stop_token_ids": (3, 4)},
    {"allowed_token_ids": (1, 5, 30, 12, 9), "logit_bias": {2: 9.0}},
    {"bad_words_token_ids": ((3,), (6, 7, 8), (7, 11), (5, 6, 6, 6, 7, 0), (1, 7, 4), (6, 5))},
    {"allowed_token_ids": tuple(range(20)), "bad_words_token_ids": ((7, 3),), "top_p": 0.8},
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 1.5
    context: dict[str, Any] = {"prompt": (0, 1, 2, 2), "output": (2, 5, 6, 6, 6, 7), "eos": (9,)}
    rows = [make_row(**context, **params, seed=seed) for seed in range(NUM_DRAWS)]
    tokens = sample(logits.repeat(NUM_DRAWS, 1), rows)
    assert tokens.dtype == torch.int64
    assert_follows(tokens, distribution(logits.numpy(), rows[0]))


def test_positions_of_one_seed_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    rows = [make_row(output=(0,) * i, seed=-5) for i in range(5_000)]
    assert_follows(sample(logits.repeat(len(rows), 1), rows), distribution(logits.numpy(), rows[0]))


def assert_follows(tokens: torch.Tensor, probs: np.ndarray) -> None:
    observed = np.bincount(tokens.numpy(), minlength=len(probs))
    assert observed[probs == 0].sum() == 0
    expected = probs * len(tokens)
    common = expected >= 5
    assert (observed[expected >= 20] > 0).all()
    test = stats.chisquare(
        np.append(observed[common], observed[~common].sum()) + 1e-9,
        np.append(expected[common], expected[~common].sum()) + 1e-9,
    )
    assert test.pvalue > 1e-3


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.0, 5.0, 1e30])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 600, 10_000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-9, 0.5, 0.99])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, -0.7])),
        logit_bias=draw(st.sampled_from([None, {0: 5.0, 2: -100.0}])),
        min_tokens=draw(st.sampled_from([0, 3])),
        stop_token_ids=(1,),
        allowed_token_ids=draw(st.sampled_from([None, None, (0, 2)])),
        bad_words_token_ids=draw(st.sampled_from([(), (), ((2,),), ((0, 2), (1, 0))])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[SamplingRow]]:
    """Up to 40 rows, some with many equal logits."""
    vocab_size = draw(st.sampled_from([3, 17, 511, 1500]))
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=6).map(tuple)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    rows = draw(st.lists(st.tuples(params(), tokens, tokens), min_size=1, max_size=40))
    logits = torch.randn(len(rows), vocab_size, generator=generator) * 3
    if draw(st.booleans()):
        logits = logits.round()
    as_array = [(p, np.array(a, np.int64), np.array(b, np.int64)) for p, a, b in rows]
    return logits, [SamplingRow(p, (0,), a, b, TokenLimits.of(p)) for p, a, b in as_array]


@given(batches(), st.randoms(use_true_random=False))
@examples(40)
def test_a_row_does_not_depend_on_its_company(
    batch: tuple[torch.Tensor, list[SamplingRow]], random: Any
) -> None:
    logits, rows = batch
    before = logits.clone()
    together = sample(logits, rows).tolist()
    assert torch.equal(logits, before)
    order = list(range(len(rows)))
    random.shuffle(order)
    assert sample(logits[order], [rows[i] for i in order]).tolist() == [together[i] for i in order]
    for i, row in enumerate(rows):
        assert sample(logits[i : i + 1], [row]).item() == together[i]


def test_a_row_does_not_depend_on_its_company_in_a_large_vocabulary() -> None:
    """Of a size that splits over threads, and leaves a rest behind the vector width."""
    logits = torch.randn(24, 50_257, generator=torch.Generator().manual_seed(0)) * 2
    choices = ({}, {"top_p": 0.95}, {"top_k": 50}, {"min_p": 0.01}, {"temperature": 0.0})
    rows = [make_row(seed=i, **choices[i % len(choices)]) for i in range(len(logits))]
    with torch.inference_mode():
        together = sample(logits, rows).tolist()
        assert together == [sample(logits[i : i + 1], [rows[i]]).item() for i in range(len(rows))]


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [2.0, 2.0, 2.0, 2.0]])
    assert sample(logits, [make_row(temperature=0.0)] * 2).tolist() == [1, 0]


def test_greedy_looks_at_adjusted_logits() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    row = make_row(temperature=0.0, frequency_penalty=1.5, output=(0, 0))
    assert adjusted(logits[0].numpy(), row).argmax() == sample(logits, [row]).item() == 1


def test_greedy_rows_need_no_seed() -> None:
    assert sample(torch.eye(3), [make_row(temperature=0.0, seed=None)] * 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1},
        {"top_k": 1, "temperature": 1e30},
        {"top_p": 1e-12},
        {"top_p": 5e-324},
        {"min_p": 1.0},
        {"temperature": 1e-6},
        {"temperature": 5e-324},
    ],
    ids=str,
)
def test_settings_that_leave_only_the_best(params: dict[str, Any]) -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(2))
    logits[:, 5] = -INF
    rows = [make_row(seed=i, **params) for i in range(len(logits))]
    assert torch.equal(sample(logits, rows), logits.argmax(dim=-1))


@pytest.mark.parametrize("temperature", [1e30, 1.7e308])
def test_a_huge_temperature_is_uniform_over_what_is_allowed(temperature: float) -> None:
    logits = torch.tensor([5.0, -INF, 0.0, -50.0])
    rows = [make_row(seed=i, temperature=temperature) for i in range(3000)]
    tokens = sample(logits.repeat(len(rows), 1), rows)
    assert_follows(tokens, np.array([1 / 3, 0.0, 1 / 3, 1 / 3]))


def test_ends_are_forbidden_only_until_min_tokens() -> None:
    """Ids past the vocabulary, as some checkpoints' end tokens have, are no obstacle."""
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    ends: dict[str, Any] = {"eos": (0, 7), "stop_token_ids": (1,), "temperature": 0.0}
    assert sample(logits, [make_row(min_tokens=2, output=(2,), **ends)]).item() == 2
    assert sample(logits, [make_row(min_tokens=2, output=(2, 2), **ends)]).item() == 0


@pytest.mark.parametrize("bad", [float("nan"), INF], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_names_the_rows_without_a_finite_best(bad: float, temperature: float) -> None:
    logits = torch.randn(4, 100)
    logits[1, 42] = bad
    logits[3] = -INF
    with pytest.raises(ValueError, match=r"rows \[1, 3\] of 4 are not finite"):
        sample(logits, [make_row(temperature=temperature)] * 4)


@pytest.mark.parametrize("bad", [float("nan"), INF], ids=str)
def test_a_fault_of_the_model_is_told_where_settings_forbid_its_token(bad: float) -> None:
    logits = torch.randn(2, 100)
    logits[1, 42] = bad
    with pytest.raises(ValueError, match=r"rows \[1\] of 2 are not finite"):
        sample(logits, [make_row(allowed_token_ids=(1, 2))] * 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_may_have_no_token_is_told_apart_and_harms_no_other(temperature: float) -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(3))
    stuck = make_row(
        temperature=temperature,
        output=(1,),
        allowed_token_ids=(2, 3),
        bad_words_token_ids=((2,), (1, 3)),
    )
    free = make_row(temperature=temperature)
    alone = sample(logits[:1], [free]).item()
    assert sample(logits, [free, stuck, stuck]).tolist() == [alone, NO_TOKEN, NO_TOKEN]
    logits[1] = -INF
    with pytest.raises(ValueError, match=r"rows \[1\] of 3 are not finite"):
        sample(logits, [free, stuck, stuck])
