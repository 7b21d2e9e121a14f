"""Logits of every architecture against transformers', in float32."""

import json
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from legato.checkpoint.loader import open_checkpoint
from legato.core.config import ModelConfig

from .conftest import TINY, SaveTiny, assert_same_logits, load, reference_logits
from .dense import packed_logits

PROMPTS = [[(7 * i + 3 * i * i) % 320 for i in range(n)] for n in (40, 1, 17)]


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
CONFIGS = {
    "llama-llama3-untied": LlamaConfig(**TINY, rope_parameters=LLAMA3),
    "llama-tied": LlamaConfig(**TINY, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "llama-linear": LlamaConfig(**TINY, rope_parameters=rope("linear", factor=2.0)),
    "mistral-window": MistralConfig(**TINY, sliding_window=9),
    "mistral-no-window": MistralConfig(**TINY, sliding_window=None, head_dim=24),
    "qwen2": Qwen2Config(**TINY),
    "qwen2-yarn": Qwen2Config(**TINY, rope_parameters=YARN),
    "qwen2-window": Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**TINY, head_dim=32, tie_word_embeddings=True),
    "qwen3-bias": Qwen3Config(**TINY, head_dim=32, attention_bias=True),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_equal_transformers(config: PreTrainedConfig, save_tiny: SaveTiny) -> None:
    folder, model = save_tiny(config)
    for prompt, logits in zip(PROMPTS, packed_logits(load(folder), PROMPTS), strict=True):
        assert_same_logits(logits, reference_logits(model, prompt))


def test_sharded_checkpoint(save_tiny: SaveTiny) -> None:
    folder, model = save_tiny(CONFIGS["qwen3"], max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    (logits,) = packed_logits(load(folder), PROMPTS[:1])
    assert_same_logits(logits, reference_logits(model, PROMPTS[0]))


def test_rope_scaling_as_older_checkpoints_spell_it(save_tiny: SaveTiny) -> None:
    folder, model = save_tiny(CONFIGS["llama-llama3-untied"])
    path = folder / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    path.write_text(json.dumps(config | {"rope_scaling": parameters}))
    (logits,) = packed_logits(load(folder), PROMPTS[:1])
    assert_same_logits(logits, reference_logits(model, PROMPTS[0]))


def test_windows_are_per_layer(save_tiny: SaveTiny) -> None:
    folder, _ = save_tiny(CONFIGS["qwen2-window"])
    spec = open_checkpoint(ModelConfig(model=str(folder))).spec
    assert spec.windows == (None, 5, 5)
    assert (spec.max_model_len, spec.head_dim) == (256, 16)


def test_bfloat16_is_close_and_logits_stay_float32(save_tiny: SaveTiny) -> None:
    folder, model = save_tiny(CONFIGS["qwen3"])
    decoder = load(folder, "bfloat16")
    assert decoder.dtype == torch.bfloat16
    assert decoder.rotary[0].inverse.dtype == torch.float32
    (logits,) = packed_logits(decoder, PROMPTS[:1])
    assert logits.dtype == torch.float32
    expected = reference_logits(model, PROMPTS[0])
    assert float((logits - expected).abs().mean() / expected.abs().mean()) < 0.05


def test_auto_dtype_is_the_checkpoints(save_tiny: SaveTiny) -> None:
    folder, model = save_tiny(CONFIGS["llama-tied"])
    assert open_checkpoint(ModelConfig(model=str(folder))).dtype == torch.float32
    model.to(torch.float16).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    assert open_checkpoint(ModelConfig(model=str(folder))).dtype == torch.float16
    path.write_text(json.dumps({key: config[key] for key in config if "dtype" not in key}))
    assert open_checkpoint(ModelConfig(model=str(folder))).dtype == torch.float16
