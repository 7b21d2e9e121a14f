"""Log probabilities and ranks against SciPy's."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from legato.executor.logprobs import compute_logprobs, score


def test_equals_scipy() -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0)) * 5
    before = logits.clone()
    chosen = torch.tensor([0, 999, 5, 5, 7, 8])
    num_top = [0, 1, 20, 3, 0, 5]
    expected = log_softmax(logits.double().numpy(), axis=-1)
    results = compute_logprobs(logits, chosen, num_top)
    assert torch.equal(logits, before)
    for row, token, count, result in zip(expected, chosen.tolist(), num_top, results, strict=True):
        best = np.argsort(-row)[:count]
        assert result.token_id == token
        assert result.logprob == pytest.approx(row[token], abs=1e-5)
        assert result.rank == 1 + (row > row[token]).sum()
        assert [i for i, _ in result.top] == best.tolist()
        assert [p for _, p in result.top] == pytest.approx(row[best].tolist(), abs=1e-5)


def test_equal_logits_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0]]).repeat(5, 1)
    results = compute_logprobs(logits, torch.arange(5), [0] * 5)
    assert [result.rank for result in results] == [5, 1, 1, 3, 3]
    assert all(result.top == () for result in results)


def test_forbidden_tokens_have_no_probability() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 0.0]])
    (result,) = compute_logprobs(logits, torch.tensor([1]), [2])
    assert (result.logprob, result.rank) == (float("-inf"), 3)
    assert [p for _, p in result.top] == pytest.approx([np.log(0.5)] * 2)


def test_no_rows() -> None:
    assert compute_logprobs(torch.empty(0, 10), torch.empty(0, dtype=torch.int64), []) == []


def test_a_row_does_not_depend_on_its_company() -> None:
    logits = torch.randn(9, 50_257, generator=torch.Generator().manual_seed(1))
    chosen = torch.arange(9)
    together = compute_logprobs(logits, chosen, list(range(9)))
    for i in range(9):
        assert compute_logprobs(logits[i : i + 1], chosen[i : i + 1], [i]) == [together[i]]


def test_listed_tokens_are_scored_with_the_chosen_one() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(2))
    listed, chosen = [7, 99, 3], torch.tensor([7, 50, 3])
    entries = score(logits, chosen, 0, torch.tensor(listed)).entries([4] * 3)
    for row, entry in zip(log_softmax(logits.numpy(), axis=-1), entries, strict=True):
        ids = sorted({*listed, entry.token_id}, key=lambda i: -row[i])
        assert [i for i, _ in entry.top] == ids
        assert [p for _, p in entry.top] == pytest.approx(row[ids].tolist(), abs=1e-5)
