"""Greedy tokens of the real model in fp32 are those of transformers, under any schedule."""

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from legato import LLM, SamplingParams
from legato.llm.prompts import TokensPrompt
from legato.model.decoder import Decoder
from tests.exactness.logits import (
    chunked_logits,
    legato_model,
    natural_tokens,
    transformers_logits,
)
from tests.exactness.test_embeddings import POOLINGS, embedded, hidden_states, pool

LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 33, 63, 64, 65, 128, 200, 513, 1100)
NUM_TOKENS = 8
UNLIMITED = 8192
ALONE = {
    1: (7, 8),
    7: (8, 15, 16, 17),
    64: (65, 128),
    512: (513,),
    UNLIMITED: (1, 2, 16, 17, 65, 200),
}
"""Lengths, by tokens a step. Alone, a prompt that fits into a step is computed as without a limit.
"""
LONGEST_TOGETHER = {1: 8, 7: 33, 64: 200, 512: 513, UNLIMITED: 1100}
"""By tokens a step; few take a step or two a token, and long prompts are most of the work.
`test_logits_agree` passes the edges of blocks in chunks of 7, too."""
NEAR_TIE = 1e-3
"""Where the best two logits are closer than this, rounding may pick either."""


Prompts = list[list[int]]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return [natural_tokens(length, skip=37 * i) for i, length in enumerate(LENGTHS)]


class Checker:
    """Compares outputs with the logits of transformers.

    One forward pass over a prompt and its output yields the logits for each token of the output,
    for far less than a pass a token. Most schedules have the same outputs, so few are computed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._checked: set[tuple[int, ...]] = set()

    def assert_greedy(self, prompts: Prompts, outputs: list[list[int]]) -> None:
        """Each token has the best logit after the tokens before it."""
        for prompt, tokens in zip(prompts, outputs, strict=True):
            assert len(tokens) == NUM_TOKENS
            whole = (*prompt, *tokens)
            if whole not in self._checked:
                logits = transformers_logits(self._model, [*whole[:-1]], keep=NUM_TOKENS)
                chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                missed = logits.max(dim=1).values - chosen
                where = f"token {int(missed.argmax())} after a prompt of {len(prompt)}"
                assert float(missed.max()) < NEAR_TIE, where
                self._checked.add(whole)


@pytest.fixture(scope="module")
def checker(transformers_fp32: PreTrainedModel) -> Checker:
    return Checker(transformers_fp32)


def _llm(budget: int, **settings: object) -> LLM:
    return LLM(
        dtype="float32",
        max_num_batched_tokens=budget,
        max_num_seqs=16,
        **settings,  # type: ignore[arg-type]
    )


def _complete(llm: LLM, prompts: Prompts, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    read = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    results = llm.generate(read, params, use_tqdm=False)
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(params=[1, 7, 64, 512, UNLIMITED], scope="module")
def budget(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def unlimited() -> LLM:
    return _llm(UNLIMITED, enable_prefix_caching=False)  # the same prompts again are to be computed


@pytest.fixture(scope="module")
def llm(unlimited: LLM, budget: int) -> LLM:
    """One model for all budgets, which are settings of the scheduler."""
    engine = unlimited._engine
    config = engine._scheduler._config
    engine.reconfigure(msgspec.structs.replace(config, max_num_batched_tokens=budget))
    return unlimited


def _up_to(longest: int, prompts: Prompts) -> Prompts:
    return [prompt for prompt in prompts if len(prompt) <= longest]


def test_alone(llm: LLM, budget: int, prompts: Prompts, checker: Checker) -> None:
    some = [prompt for prompt in prompts if len(prompt) in ALONE[budget]]
    checker.assert_greedy(some, [_complete(llm, [prompt])[0] for prompt in some])


def test_in_a_mixed_batch(llm: LLM, budget: int, prompts: Prompts, checker: Checker) -> None:
    some = _up_to(LONGEST_TOGETHER[budget], prompts)
    checker.assert_greedy(some, _complete(llm, some))


def test_with_a_warm_cache(prompts: Prompts, checker: Checker) -> None:
    """Prompts behind their own twins, once more, and with the first half of their answers."""
    llm = _llm(64, block_size=4)
    some = _up_to(128, prompts)
    cold = [prompt for prompt in some for _ in range(2)]
    checker.assert_greedy(cold, _complete(llm, cold))
    num_followed = llm.stats.num_prefix_cache_hits
    assert num_followed == sum((len(prompt) - 1) // 4 * 4 for prompt in some)
    outputs = _complete(llm, some)
    checker.assert_greedy(some, outputs)
    assert llm.stats.num_prefix_cache_hits == 2 * num_followed
    halves = [tokens[: NUM_TOKENS // 2] for tokens in outputs]
    longer = [prompt + half for prompt, half in zip(some, halves, strict=True)]
    others = _complete(llm, longer, NUM_TOKENS // 2)
    joined = [half + other for half, other in zip(halves, others, strict=True)]
    checker.assert_greedy(some, joined)
    assert llm.stats.num_prefix_cache_hits > 3 * num_followed


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_after_preemption(prompts: Prompts, checker: Checker, enable_prefix_caching: bool) -> None:
    """The cache holds the prompts of some requests, but not their outputs."""
    some = [prompt for prompt in prompts if 60 <= len(prompt) <= 256]
    num_blocks = sum(-(-len(prompt) // 4) for prompt in some) + 8
    bytes_per_token = 2 * 30 * 3 * 64 * 4
    llm = _llm(
        UNLIMITED,
        block_size=4,
        kv_cache_memory_bytes=num_blocks * 4 * bytes_per_token,
        max_model_len=512,
        enable_prefix_caching=enable_prefix_caching,
        admission_optimism=1.0,
    )
    checker.assert_greedy(some, _complete(llm, some))
    assert llm.stats.num_preemptions > 0


@pytest.fixture(scope="module")
def legato_fp32() -> Decoder:
    return legato_model(torch.float32)


@pytest.fixture(scope="module")
def expected_logits(
    request: pytest.FixtureRequest, transformers_fp32: PreTrainedModel
) -> tuple[list[int], torch.Tensor]:
    """Tokens, and transformers' logits of the last 32 of them."""
    tokens = natural_tokens(request.param)
    return tokens, transformers_logits(transformers_fp32, tokens, keep=32)


@pytest.mark.parametrize(
    ("expected_logits", "chunk"),
    [(64, 7), (64, 64), (500, 47), (500, 64), (500, 512)],
    indirect=["expected_logits"],
    scope="module",
)
def test_logits_agree(
    legato_fp32: Decoder, expected_logits: tuple[list[int], torch.Tensor], chunk: int
) -> None:
    tokens, expected = expected_logits
    logits = chunked_logits(legato_fp32, tokens, chunk, keep=32)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_embeddings(transformers_fp32: PreTrainedModel) -> None:
    prompts = [natural_tokens(length, skip=37 * length) for length in (1, 64, 65, 200)]
    llm = LLM(dtype="float32", max_model_len=512, max_num_batched_tokens=64)
    states = [hidden_states(transformers_fp32, prompt) for prompt in prompts]
    for pooling in POOLINGS:
        for vector, want in zip(embedded(llm, prompts, pooling=pooling), states, strict=True):
            np.testing.assert_allclose(vector, pool(want, pooling), atol=1e-5)
    texts = "The cat sits on the mat.", "A cat is sitting on a mat.", "GDP fell by 2 % in 1931."
    near, other, far = (
        np.array(one.outputs.embedding) for one in llm.embed(texts, pooling="mean", use_tqdm=False)
    )
    assert near @ other > near @ far
