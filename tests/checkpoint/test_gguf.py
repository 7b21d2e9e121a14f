"""GGUF files: the real SmolLM2, and tiny ones written here."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from legato.checkpoint.gguf import _GLOBAL_NAMES, _LAYER_NAMES
from legato.checkpoint.gguf_file import GGUFFile
from legato.checkpoint.loader import open_checkpoint
from legato.core.config import ModelConfig
from legato.core.errors import UnsupportedModelError
from tests.checkpoint.gguf_keys import check_keys
from tests.model.conftest import TINY, SaveTiny, assert_same_logits, load, reference_logits
from tests.model.dense import packed_logits

PROMPT = [(11 * i + 5 * i * i) % 320 for i in range(40)]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def gguf_writer(path: Path, architecture: str, config: PreTrainedConfig) -> GGUFWriter:
    """Begin a file with the metadata that all decoders have."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    return writer


def write_gguf(
    path: Path,
    architecture: str,
    model: PreTrainedModel,
    *,
    add_tokenizer: Callable[[GGUFWriter], None] | None = None,
    quantization: GGMLQuantizationType | None = None,
    **extra: Any,
) -> None:
    """Write `model` as llama.cpp's converter would; `extra` are further metadata and tensors.

    Args:
        quantization: of the matrices.
    """
    config = model.config
    writer = gguf_writer(path, architecture, config)
    if add_tokenizer is not None:
        add_tokenizer(writer)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in extra.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        else:
            writer.add_uint32(f"{architecture}.{key}", value)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            rows = gguf_rows(name, tensor, architecture, config)
            if quantization is not None and rows.ndim == 2:
                rows = quantize(rows, quantization)
                writer.add_tensor(gguf_name(name), rows, raw_dtype=quantization)
            else:
                writer.add_tensor(gguf_name(name), rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    for gguf, hf in _GLOBAL_NAMES.items():
        if name == f"{hf}.weight":
            return f"{gguf}.weight"
    _, _, layer, rest = name.split(".", 3)
    stem, suffix = rest.rsplit(".", 1)
    (gguf,) = (gguf for gguf, hf in _LAYER_NAMES.items() if hf == stem)
    return f"blk.{layer}.{gguf}.{suffix}"


def gguf_rows(name: str, tensor: torch.Tensor, architecture: str, config: Any) -> np.ndarray:
    rows = tensor.numpy()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, num_heads in heads.items():
        if architecture == "llama" and part in name:
            halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
            rows = halves.swapaxes(1, 2).reshape(rows.shape)
    return np.ascontiguousarray(rows)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", LlamaConfig(**TINY, attention_bias=True)),
        ("qwen2", Qwen2Config(**TINY, rms_norm_eps=1e-5)),
        ("qwen3", Qwen3Config(**TINY, head_dim=32, tie_word_embeddings=True)),
    ],
    ids=["llama", "qwen2", "qwen3"],
)
def test_gguf_equals_its_transformers_twin(
    architecture: str, config: Any, save_tiny: SaveTiny, tmp_path: Path
) -> None:
    _, model = save_tiny(config)
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, model)
    check_keys(path)
    checkpoint = open_checkpoint(ModelConfig(model=str(path)))
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.spec.tie_word_embeddings == config.tie_word_embeddings
    (logits,) = packed_logits(load(path, "float32"), [PROMPT])
    assert_same_logits(logits, reference_logits(model, PROMPT))


def test_llama3_rope_factors(save_tiny: SaveTiny, tmp_path: Path) -> None:
    _, model = save_tiny(LlamaConfig(**TINY, rope_parameters=LLAMA3))
    plain = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert not np.allclose(factors, 1.0)
    write_gguf(tmp_path / "model.gguf", "llama", model, **{"rope_freqs.weight": factors})
    (logits,) = packed_logits(load(tmp_path / "model.gguf", "float32"), [PROMPT])
    assert_same_logits(logits, reference_logits(model, PROMPT))


def test_factors_of_yarn(save_tiny: SaveTiny, tmp_path: Path) -> None:
    """The file's factors multiply the usual temperature, as in llama.cpp."""
    parameters = (
        LLAMA3 | {"rope_type": "yarn", "factor": 4.0} | {"beta_fast": 20.0, "beta_slow": 2.0}
    )
    usual = 0.1 * math.log(4.0) + 1
    parameters["attention_factor"] = 0.75 * 0.5 * usual
    _, model = save_tiny(LlamaConfig(**TINY, rope_parameters=parameters))
    keys = {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": int(parameters["original_max_position_embeddings"]),
        "yarn_beta_fast": 20.0,
        "yarn_beta_slow": 2.0,
        "attn_factor": 0.75,
        "yarn_attn_factor": 0.5,
        "yarn_ext_factor": 1.0,
    }
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", model, **{f"rope.scaling.{key}": own for key, own in keys.items()})
    assert open_checkpoint(ModelConfig(model=str(path))).keys.unread == ()
    (logits,) = packed_logits(load(path, "float32"), [PROMPT])
    assert_same_logits(logits, reference_logits(model, PROMPT))


def test_window_of_a_mistral_file(save_tiny: SaveTiny, tmp_path: Path) -> None:
    _, model = save_tiny(MistralConfig(**TINY, sliding_window=7))
    write_gguf(tmp_path / "model.gguf", "llama", model, **{"attention.sliding_window": 7})
    (logits,) = packed_logits(load(tmp_path / "model.gguf", "float32"), [PROMPT])
    assert_same_logits(logits, reference_logits(model, PROMPT))


@pytest.mark.parametrize(
    "key", ["attention.kept_tokens", "rope.scaling.alpha", "expert_gating_func"]
)
def test_metadata_that_nothing_reads_is_named(
    key: str, save_tiny: SaveTiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, model = save_tiny(LlamaConfig(**TINY))
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", model, **{key: 2})
    load(path)
    (warned,) = (r.message for r in caplog.records if "nothing reads" in r.message)
    assert warned.endswith(f": llama.{key}")


def test_settings_of_sampling_in_metadata_are_named(save_tiny: SaveTiny, tmp_path: Path) -> None:
    _, model = save_tiny(LlamaConfig(**TINY))
    path = tmp_path / "model.gguf"

    def add(writer: GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_float32("general.sampling.mirostat_tau", 5.0)
        writer.add_name("tiny")

    write_gguf(path, "llama", model, add_tokenizer=add)
    keys = open_checkpoint(ModelConfig(model=str(path))).keys
    assert keys.unread == ("general.sampling.mirostat_tau",)
    assert "general.name" in keys.without_effect


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_tensor_types(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    writer = GGUFWriter(tmp_path / "t.gguf", "llama")
    tensor_type = GGMLQuantizationType[kind]
    if kind == "F16":
        writer.add_tensor("t", values.astype(np.float16))
    else:
        writer.add_tensor("t", quantize(values, tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GGUFFile(tmp_path / "t.gguf").read("t")
    assert read.shape == values.shape
    np.testing.assert_allclose(read, values, atol=0.3 if kind == "Q4_0" else 0.02)


def test_refusals(save_tiny: SaveTiny, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _, model = save_tiny(Qwen2Config(**TINY))
    write_gguf(path, "mamba", model)
    with pytest.raises(UnsupportedModelError, match="'mamba'; Legato supports llama, qwen2, qwen3"):
        load(path)
    write_gguf(path, "qwen2", model, **{"attention.sliding_window": 7})
    with pytest.raises(UnsupportedModelError, match="sliding window"):
        load(path)
    write_gguf(path, "qwen2", model, **{"blk.0.ffn_gate_exps.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"unexpected tensor blk.*_exps"):
        load(path)
    write_gguf(path, "qwen2", model)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(UnsupportedModelError, match="cut short"):
        load(path)
    for key, value, message in (
        ("block_count", 10**9, "number of layers is 1000000000"),
        ("attention.head_count", 0, "head_count is 0"),
    ):
        write_gguf(path, "qwen2", model, **{key: value})
        with pytest.raises(UnsupportedModelError, match=message):
            load(path)
    for content in (b"GGUF\x03", b"no model", b""):
        path.write_bytes(content)
        with pytest.raises(UnsupportedModelError, match=r"not a readable GGUF|is empty"):
            load(path)
