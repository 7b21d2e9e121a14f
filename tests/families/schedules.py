"""Greedy tokens of a small model, under any schedule, against transformers'.

Prompts are longer than a window and several blocks.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from legato import LLM, SamplingParams
from tests.families.tiny import VOCAB_SIZE

BLOCK_SIZE = 8
NUM_TOKENS = 6
PROMPTS = [
    [(7 * i + 3 * i * i + salt) % VOCAB_SIZE for i in range(n)] for n, salt in ((90, 0), (70, 5))
]
NEAR_TIE = 1e-4
"""Where the best two logits are closer than this part of the largest, either may be picked."""


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return tokens and their log probabilities; no token is at a near tie."""
    tokens, logprobs = list(prompt), []
    for _ in range(NUM_TOKENS):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        best = logits.topk(2)
        gap = float(best.values[0] - best.values[1])
        assert gap > NEAR_TIE * float(logits.abs().max()), "choose another prompt"
        tokens.append(int(best.indices[0]))
        logprobs.append(float(logits.log_softmax(-1)[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


@torch.inference_mode()
def assert_best(model: PreTrainedModel, prompt: list[int], output: list[int]) -> None:
    """Each token is the best after those before it, or nearly as good."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    best = logits.max(-1).values
    chosen = logits[torch.arange(len(output)), torch.tensor(output)]
    assert bool((best - chosen <= NEAR_TIE * logits.abs().max()).all())


def check_schedules(reference: PreTrainedModel, folder: Path, **settings: Any) -> None:
    """Compare with `reference` in float32: chunked at 7 and 64, mixed, and with prefix hits.

    Args:
        folder: where the model is saved.
        settings: of `LLM`.
    """
    reference.save_pretrained(folder)
    expected = [greedy(reference, prompt) for prompt in PROMPTS]
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=7,
        max_model_len=128,
        kv_cache_memory_bytes=2**21,
        **settings,
    )
    for budget in (7, 64):
        engine = llm._engine
        config = engine._scheduler._config
        engine.reconfigure(msgspec.structs.replace(config, max_num_batched_tokens=budget))
        prompts = [PROMPTS[0], *PROMPTS, PROMPTS[1]]
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
        results = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        for result, (tokens, logprobs) in zip(
            results, [expected[0], *expected, expected[1]], strict=True
        ):
            (output,) = result.outputs
            assert output.token_ids == tokens
            found = [entry.logprob for entry in output.logprobs]
            assert found == pytest.approx(logprobs, abs=1e-3)
    hits = llm.stats.num_prefix_cache_hits
    # With recurrent layers, prompts begin after their first 64 tokens, where the state is kept.
    assert hits >= (2 * (80 + 64) if llm._engine._kv.states is None else 6 * 64)
