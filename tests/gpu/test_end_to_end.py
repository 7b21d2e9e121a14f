"""Whole engines on a GPU: chunked, mixed, preempted, with prefix hits, two steps ahead."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.torch_executor import TorchExecutor
from tests.gpu.executors import Engine, make_executor, request
from tests.model.conftest import SaveTiny, load, save_tiny

__all__ = ["save_tiny"]

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "qwen3": Qwen3Config(
        **SMALL, num_attention_heads=3, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True
    ),
    "phi3, a part of each head rotated": Phi3Config(
        **SMALL,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        **SPECIAL_TOKENS,
    ),
    "gpt-oss, with sinks and limited gates": GptOssConfig(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=8,
        swiglu_limit=1.0,
        **SPECIAL_TOKENS,
    ),
    "granite-moe, with factors": GraniteMoeConfig(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        num_experts_per_tok=1,
        embedding_multiplier=12.0,
        attention_multiplier=0.2,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        **SPECIAL_TOKENS,
    ),
    "glm4-moe, a layer without experts": Glm4MoeConfig(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_group=3,
        topk_group=2,
        first_k_dense_replace=1,
        **SPECIAL_TOKENS,
    ),
}
BLOCKS = {"block_size": 2, "num_blocks": 11}
PROMPTS = {"a": [5, 20, 45, 80, 1, 2, 3, 4, 6], "b": [7], "c": [5, 20, 45, 80, 9]}
"""The first blocks of two are the same."""
NUM_TOKENS = 6


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_greedy_tokens_are_those_of_transformers(
    config: PreTrainedConfig, save_tiny: SaveTiny
) -> None:
    folder, model = save_tiny(config)
    executor, _ = make_executor(load(folder), **BLOCKS, depth=2)
    engine = Engine(executor, **BLOCKS, max_num_batched_tokens=7, admission_optimism=1.0)
    requests = [request(name, prompt, max_tokens=NUM_TOKENS) for name, prompt in PROMPTS.items()]
    tokens = engine.run(requests)
    for name, prompt in PROMPTS.items():
        assert tokens[name] == greedy(model, prompt, NUM_TOKENS), name
    assert engine.stats.num_preemptions
    assert engine.stats.num_prefix_cache_hits
    assert engine.stats.kv_usage == 0.0


def test_tokens_of_a_quantized_cache_are_those_of_a_cpu(save_tiny: SaveTiny) -> None:
    plain = load(save_tiny(CONFIGS["llama"])[0])
    cache = replace(plain.cache, is_quantized=True)
    on_cpu = TorchExecutor(
        plain, TorchAttentionBackend(cache, device=plain.device, **BLOCKS), BLOCKS["block_size"]
    )
    on_gpu, _ = make_executor(plain, **BLOCKS, depth=2, has_quantized_cache=True)
    requests = [request(name, PROMPTS[name], max_tokens=3) for name in "ac"]
    settings = {"max_num_batched_tokens": 7, "admission_optimism": 1.0}
    expected, tokens = (
        Engine(executor, **BLOCKS, **settings).run(requests) for executor in (on_cpu, on_gpu)
    )
    assert tokens == expected
