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
def greedy(
    model: PreTrainedModel, prompt: list[int], num_tokens: int = NUM_TOKENS
) -> tuple[list[int], list[float]]:
    """Return tokens and their log probabilities; no token is at a near tie."""
    tokens, logprobs = list(prompt), []
    for _ in range(num_tokens):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        best = logits.topk(2)
        gap = float(best.values[0] - best.values[1])
        assert gap > NEAR_TIE * float(logits.abs().max()), "choose another prompt"
        tokens.append(int(best.indices[0]))
        logprobs.append(float(logits.log_softmax(-1)[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


@torch.inference_mode()
def greedy_logprobs(model: PreTrainedModel, prompt: list[int], output: list[int]) -> list[float]:
    """Return log probabilities of an output that is greedy, and nowhere at a near tie.

    One pass: where each token is the best after those before it, all are those of `greedy`.
    """
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2)
    assert output == best.indices[:, 0].tolist()
    gaps = best.values[:, 0] - best.values[:, 1]
    assert bool((gaps > NEAR_TIE * logits.abs().amax(-1)).all()), "choose another prompt"
    scores: list[float] = (best.values[:, 0] - logits.logsumexp(-1)).tolist()
    return scores


@torch.inference_mode()
def assert_best(model: PreTrainedModel, prompt: list[int], output: list[int]) -> None:
    """Each token is the best after those before it, or nearly as good."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    best = logits.max(-1).values
    chosen = logits[torch.arange(len(output)), torch.tensor(output)]
    assert bool((best - chosen <= NEAR_TIE * logits.abs().max()).all())


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Return settings of an `LLM` of a tiny model, in float32."""
    return {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "max_model_len": 128,
        "kv_cache_memory_bytes": 2**21,
        **more,
    }


def generate(llm: LLM, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Return the greedy tokens of each prompt, all sent together."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [one.outputs[0].token_ids for one in llm.generate(given, params, use_tqdm=False)]


def check_schedules(reference: PreTrainedModel, folder: Path, **more: Any) -> None:
    """Compare with `reference` in float32: chunked at 7 and 64, mixed, and with prefix hits.

    Args:
        folder: where the model is saved.
        more: settings of the `LLM`.
    """
    llm = LLM(**settings(folder, max_num_batched_tokens=7, **more))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    expected: dict[int, tuple[list[int], list[float]]] = {}
    for budget in (7, 64):
        engine = llm._engine
        config = engine._scheduler._config
        engine.reconfigure(msgspec.structs.replace(config, max_num_batched_tokens=budget))
        asked = (0, 0, 1, 1)
        results = llm.generate(
            [{"prompt_token_ids": PROMPTS[which]} for which in asked], params, use_tqdm=False
        )
        for which, result in zip(asked, results, strict=True):
            (output,) = result.outputs
            found = output.token_ids
            if which not in expected:
                assert len(found) == NUM_TOKENS
                expected[which] = found, greedy_logprobs(reference, PROMPTS[which], found)
            tokens, logprobs = expected[which]
            assert found == tokens
            scores = [entry.logprob for entry in output.logprobs]
            assert scores == pytest.approx(logprobs, abs=1e-3)
    hits = llm.stats.num_prefix_cache_hits
    # With recurrent layers, prompts begin after their first 64 tokens, where the state is kept.
    assert hits >= (2 * (80 + 64) if llm._engine._kv.states is None else 6 * 64)
