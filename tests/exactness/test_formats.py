"""Greedy tokens of the default model in published formats are those of its dequantized weights."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks.formats.gguf_copy import copy_gguf, medium_mix
from benchmarks.formats.hub_copy import save_quantized
from benchmarks.formats.hub_writers import FORMATS
from transformers import PreTrainedModel

from legato import LLM, SamplingParams
from legato.checkpoint.gguf import _transformers_name
from legato.checkpoint.gguf_transforms import undo_interleaving
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL
from tests.exactness.logits import natural_tokens

LENGTHS = (3, 33, 70)
NUM_TOKENS = 6
NUM_LAYERS = 6
"""Only the first: to quantize all thirty takes longer than all the rest."""
NEAR_TIE = 1e-3
"""Where the best two logits are closer than this, rounding may pick either."""

Save = Callable[[PreTrainedModel, Path], tuple[Path, dict[str, torch.Tensor]]]


def save_medium_mix(model: PreTrainedModel, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path = folder / "model.gguf"
    found = copy_gguf(resolve_source(DEFAULT_MODEL).path, path, medium_mix, NUM_LAYERS)
    heads = {
        "attn_q": model.config.num_attention_heads,
        "attn_k": model.config.num_key_value_heads,
    }
    values: dict[str, torch.Tensor] = {}
    for name, array in found.items():
        weight, part = torch.tensor(array), name.split(".")[-2]
        if part in heads:
            weight = undo_interleaving(weight, heads[part])
        values[_transformers_name(name)] = weight
    return path, values


def save_act_order(model: PreTrainedModel, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    return folder, save_quantized(model, folder, FORMATS["GPTQ act-order"])


@pytest.mark.parametrize("save", [save_medium_mix, save_act_order], ids=["Q4_K_M", "GPTQ"])
def test_greedy_tokens(save: Save, transformers_fp32: PreTrainedModel, tmp_path: Path) -> None:
    """In chunks of 7 beside other requests' decodes, then again with the prompts cached."""
    model = copy.deepcopy(transformers_fp32)
    model.model.layers = model.model.layers[:NUM_LAYERS]
    model.config.num_hidden_layers = NUM_LAYERS
    path, values = save(model, tmp_path)
    model.load_state_dict(values, strict=False)
    prompts = [natural_tokens(length, skip=37 * i) for i, length in enumerate(LENGTHS)]
    llm = LLM(
        str(path),
        tokenizer=DEFAULT_MODEL,
        dtype="float32",
        max_num_batched_tokens=7,
        max_model_len=256,
        kv_cache_memory_bytes=2**27,
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for _ in range(2):
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_greedy(model, prompt, list(answer.outputs[0].token_ids))


@torch.inference_mode()
def assert_greedy(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    """Each token has the best logit after those before it."""
    assert len(tokens) == NUM_TOKENS
    logits = model(torch.tensor([prompt + tokens]), logits_to_keep=NUM_TOKENS + 1).logits[0, :-1]
    missed = logits.max(dim=1).values - logits[torch.arange(NUM_TOKENS), torch.tensor(tokens)]
    assert float(missed.max()) < NEAR_TIE
