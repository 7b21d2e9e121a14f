"""Verified tokens are distributed as the model says, with any drafts."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from legato.core.plan import ScheduledChunk
from legato.executor.sampler import sample
from tests.executor.sampling_reference import make_row

VOCAB_SIZE, NUM_TOKENS, NUM_DRAFTS, NUM_SEEDS = 4, 3, 3, 4000
TEMPERATURE = 0.8
LIKELY = 0.3

LOGITS = torch.randn(VOCAB_SIZE + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
"""Of a model whose next token depends on the last one; the last row is of a request without any."""
MODEL = torch.softmax(LOGITS.double() / TEMPERATURE, -1).numpy()

Rule = Callable[[Sequence[int], Sequence[int]], Sequence[int]]
"""What comes of drafts and of the tokens that were sampled before and behind them."""


def as_verified(drafts: Sequence[int], sampled: Sequence[int]) -> Sequence[int]:
    num_tokens = 1 + len(drafts)
    chunk = ScheduledChunk(
        "a", 9, num_tokens, (0,), num_tokens, "verify", draft_token_ids=tuple(drafts)
    )
    result = chunk.result(sampled)
    assert result.num_tokens == len(result.token_ids)
    return result.token_ids


def if_likely(drafts: Sequence[int], sampled: Sequence[int]) -> Sequence[int]:
    """A wrong rule: a draft counts that is not unlikely."""
    taken: list[int] = []
    for draft, token_id in zip(drafts, sampled, strict=False):
        if MODEL[taken[-1] if taken else -1, draft] < LIKELY:
            return [*taken, token_id]
        taken.append(draft)
    return [*taken, sampled[-1]]


def likeliest(seed: int) -> list[int]:  # noqa: ARG001
    drafts = [int(MODEL[-1].argmax())]
    while len(drafts) < NUM_DRAFTS:
        drafts.append(int(MODEL[drafts[-1]].argmax()))
    return drafts


def arbitrary(seed: int) -> list[int]:
    return [(seed >> 2 * place) % VOCAB_SIZE for place in range(NUM_DRAFTS)]


DRAFTS: dict[str, Callable[[int], list[int]]] = {"likeliest": likeliest, "arbitrary": arbitrary}


def p_value(draft: Callable[[int], list[int]], rule: Rule) -> tuple[float, int]:
    """The expected counts of many seeds' first tokens, and the number of drafts that counted."""
    outputs: dict[int, list[int]] = {seed: [] for seed in range(NUM_SEEDS)}
    num_accepted = 0
    while running := [seed for seed, output in outputs.items() if len(output) < NUM_TOKENS]:
        drafts = {seed: draft(seed + len(outputs[seed])) for seed in running}
        rows = [
            (seed, (*outputs[seed], *drafts[seed][:count]))
            for seed in running
            for count in range(1 + NUM_DRAFTS)
        ]
        logits = LOGITS[[row[-1] if row else VOCAB_SIZE for _, row in rows]]
        tokens = sample(
            logits,
            [make_row(output=row, seed=seed, temperature=TEMPERATURE) for seed, row in rows],
        ).reshape(-1, 1 + NUM_DRAFTS)
        for seed, sampled in zip(running, tokens.tolist(), strict=True):
            came = rule(drafts[seed], sampled)
            num_accepted += len(came) - 1
            outputs[seed] += came
    found = Counter(tuple(output[:NUM_TOKENS]) for output in outputs.values())
    cells = [*itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS)]
    expected = np.array([MODEL[-1, a] * MODEL[a, b] * MODEL[b, c] for a, b, c in cells])
    frequencies = np.array([found[cell] for cell in cells])
    return float(chisquare(frequencies, NUM_SEEDS * expected).pvalue), num_accepted


@pytest.mark.parametrize("drafts", DRAFTS)
def test_verified_tokens_are_distributed_as_the_model_says(drafts: str) -> None:
    value, num_accepted = p_value(DRAFTS[drafts], as_verified)
    assert value > 1e-3
    assert num_accepted > NUM_SEEDS / 4


@pytest.mark.parametrize("drafts", DRAFTS)
def test_this_would_show_drafts_that_count_though_others_were_drawn(drafts: str) -> None:
    value, _ = p_value(DRAFTS[drafts], if_likely)
    assert value < 1e-9
