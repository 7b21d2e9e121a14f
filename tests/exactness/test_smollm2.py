"""Greedy tokens of the real model in fp32 are those of transformers, under any schedule."""

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from legato import LLM, SamplingParams
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
LONGEST_ALONE = {1: 8, 7: 17, 64: 128, 512: 513, UNLIMITED: 64}
LONGEST_TOGETHER = {1: 17, 7: 65, 64: 200, 512: 513, UNLIMITED: 1100}
"""By tokens a step; few take a step or two a token, and long prompts are most of the work."""
NEAR_TIE = 1e-3
"""Where the best two logits are closer than this, rounding may pick either."""


@dataclass(frozen=True)
class Reference:
    """What transformers generates; `gaps[i]` is between the best two logits of token i."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


@pytest.fixture(scope="module")
def references(transformers_fp32: PreTrainedModel) -> list[Reference]:
    prompts = [natural_tokens(length, skip=37 * i) for i, length in enumerate(LENGTHS)]
    return [_generate(transformers_fp32, prompt) for prompt in prompts]


def _generate(model: PreTrainedModel, prompt: list[int]) -> Reference:
    out = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best_two = torch.cat(out.logits).topk(2).values
    gaps = (best_two[:, 0] - best_two[:, 1]).tolist()
    return Reference(prompt, out.sequences[0, len(prompt) :].tolist(), gaps)


def _assert_same(references: list[Reference], outputs: list[list[int]]) -> int:
    """Returns how many outputs left the reference at a near tie, which is allowed."""
    ties = 0
    for reference, tokens in zip(references, outputs, strict=True):
        assert len(tokens) == len(reference.tokens)
        for position, (got, expected) in enumerate(zip(tokens, reference.tokens, strict=True)):
            if got != expected:
                where = f"token {position} after a prompt of {len(reference.prompt)}"
                assert reference.gaps[position] < NEAR_TIE, where
                ties += 1
                break
    print(f"{ties} of {len(outputs)} outputs differ from a near tie on")
    return ties


def _llm(budget: int, **settings: object) -> LLM:
    return LLM(
        dtype="float32",
        max_num_batched_tokens=budget,
        max_num_seqs=16,
        **settings,  # type: ignore[arg-type]
    )


def _complete(llm: LLM, references: list[Reference]) -> list[list[int]]:
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(reference.tokens), ignore_eos=True)
        for reference in references
    ]
    prompts = [{"prompt_token_ids": reference.prompt} for reference in references]
    results = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
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


def _up_to(longest: int, references: list[Reference]) -> list[Reference]:
    return [reference for reference in references if len(reference.prompt) <= longest]


def test_alone(llm: LLM, budget: int, references: list[Reference]) -> None:
    some = _up_to(LONGEST_ALONE[budget], references)
    _assert_same(some, [_complete(llm, [reference])[0] for reference in some])


def test_in_a_mixed_batch(llm: LLM, budget: int, references: list[Reference]) -> None:
    some = _up_to(LONGEST_TOGETHER[budget], references)
    _assert_same(some, _complete(llm, some))


def test_with_a_warm_cache(references: list[Reference]) -> None:
    """Prompts behind their own twins, once more, and with the first half of their answers."""
    llm = _llm(64, block_size=4)
    some = _up_to(128, references)
    cold = [r for r in some for _ in range(2)]
    _assert_same(cold, _complete(llm, cold))
    num_followed = llm.stats.num_prefix_cache_hits
    assert num_followed == sum((len(r.prompt) - 1) // 4 * 4 for r in some)
    _assert_same(some, _complete(llm, some))
    assert llm.stats.num_prefix_cache_hits == 2 * num_followed
    half = NUM_TOKENS // 2
    later = [Reference(r.prompt + r.tokens[:half], r.tokens[half:], r.gaps[half:]) for r in some]
    _assert_same(later, _complete(llm, later))
    assert llm.stats.num_prefix_cache_hits > 3 * num_followed


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_after_preemption(references: list[Reference], enable_prefix_caching: bool) -> None:
    """The cache holds the prompts of some requests, but not their outputs."""
    some = [r for r in references if 60 <= len(r.prompt) <= 256]
    num_blocks = sum(-(-len(r.prompt) // 4) for r in some) + 8
    bytes_per_token = 2 * 30 * 3 * 64 * 4
    llm = _llm(
        UNLIMITED,
        block_size=4,
        kv_cache_memory_bytes=num_blocks * 4 * bytes_per_token,
        max_model_len=512,
        enable_prefix_caching=enable_prefix_caching,
        admission_optimism=1.0,
    )
    _assert_same(some, _complete(llm, some))
    assert llm.stats.num_preemptions > 0


@pytest.fixture(scope="module")
def legato_fp32() -> Decoder:
    return legato_model(torch.float32)


@pytest.fixture(params=[64, 500], scope="module")
def expected_logits(
    request: pytest.FixtureRequest, transformers_fp32: PreTrainedModel
) -> tuple[list[int], torch.Tensor]:
    """Tokens, and transformers' logits of the last 32 of them."""
    tokens = natural_tokens(request.param)
    return tokens, transformers_logits(transformers_fp32, tokens, keep=32)


@pytest.mark.parametrize("chunk", [7, 64, 512])
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
