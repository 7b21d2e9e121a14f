"""Latent attention: what the cache keeps, where it goes, and checkpoints as they are on the Hub."""

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.formats.hub_writers import FORMATS
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from legato import LLM
from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.cache_config import CacheConfig
from legato.core.config import EngineConfig, ModelConfig
from legato.core.errors import ConfigError
from legato.engine.build.builder import build_engine
from legato.engine.build.model_report import report_model
from legato.engine.loop.engine_loop import EngineLoop
from legato.gpu.support import why_not_computed
from legato.model.architectures import described
from legato.model.latent_architectures import LATENT_ARCHITECTURES
from legato.model.spec import MoeSpec
from tests.checkpoint.test_dummy import described as described_folder
from tests.engine import peers
from tests.families import schedules
from tests.families.conftest import Saved
from tests.families.layouts import (
    CPU,
    PROMPT,
    Config,
    Layout,
    Refusal,
    Tensors,
    check_logits,
    check_refused,
    logits_of,
    renamed,
    without,
)
from tests.families.schedules import BLOCK_SIZE, PROMPTS, assert_best, check_schedules
from tests.families.test_expert_layouts import fused
from tests.families.test_hub_layouts import nested, with_images
from tests.families.tiny import MODELS, VOCAB_SIZE
from tests.kv.conservation import check_blocks
from tests.model.conftest import assert_same_logits, reference_logits

TOKEN_BYTES = 3 * (32 + 16) * 4
"""Of the models here in float32: a latent and the rotated part of a key, in each layer."""
NUM_TOKENS = 24

generate = partial(schedules.generate, num_tokens=NUM_TOKENS)


@pytest.fixture
def folder(saved: Saved) -> Path:
    return saved("deepseek-v3")[0]


@pytest.fixture
def reference(saved: Saved) -> PreTrainedModel:
    return saved("deepseek-v3")[1]


def settings(folder: Path, num_tokens: int, **more: Any) -> dict[str, Any]:
    """Return settings of an engine whose cache has room for so many tokens."""
    room = {"kv_cache_memory_bytes": num_tokens * TOKEN_BYTES}
    return schedules.settings(folder, max_num_batched_tokens=16, **room, **more)


def test_the_cache_has_latents_alone(folder: Path) -> None:
    assert report_model(ModelConfig(model=str(folder))).cache_token_bytes == TOKEN_BYTES
    engine = LLM(**settings(folder, 50 * BLOCK_SIZE))._engine
    assert isinstance(engine, EngineLoop)
    blocks = engine._executor._attention.blocks[0]  # type: ignore[attr-defined]
    assert engine._kv.num_blocks == 50
    assert blocks.shape == (3, 1, 50, BLOCK_SIZE * 48)


def test_preempted_in_a_full_cache(reference: PreTrainedModel, folder: Path) -> None:
    llm = LLM(**settings(folder, 17 * BLOCK_SIZE, max_num_seqs=4, admission_optimism=1.0))
    prompts = [
        [(7 * i + 3 * i * i + salt) % VOCAB_SIZE for i in range(length)]
        for salt, length in enumerate((34, 30, 26, 33))
    ]
    for prompt, output in zip(prompts, generate(llm, prompts), strict=True):
        assert len(output) == NUM_TOKENS
        assert_best(reference, prompt, output)
    assert llm.stats.num_preemptions > 0
    check_blocks(llm._engine._kv)


def test_blocks_come_back_from_the_swap_space(reference: PreTrainedModel, folder: Path) -> None:
    """The cache holds one prompt; others push its blocks out."""
    llm = LLM(**settings(folder, 16 * BLOCK_SIZE, swap_space_bytes=64 * BLOCK_SIZE * TOKEN_BYTES))
    prompts = [PROMPTS[0], PROMPTS[1], [9] + PROMPTS[0]]
    for prompt in (*prompts, *prompts):
        (output,) = generate(llm, [prompt])
        assert len(output) == NUM_TOKENS
        assert_best(reference, prompt, output)
    assert llm.stats.num_prefix_cache_hits >= 88 + 64 + 88


@pytest.mark.parametrize("has_model", [False, True])
def test_drafts_change_no_token(reference: PreTrainedModel, folder: Path, has_model: bool) -> None:
    more = {"speculative_model": str(folder)} if has_model else {"speculative": 3}
    check_schedules(reference, folder, **more)


def test_another_engine_continues_a_prompt(tmp_path: Path) -> None:
    model = described_folder(tmp_path, MODELS["deepseek-v3"].config(), dtype="float32")
    with closing(peers.Engine(model)) as prefill, closing(peers.Engine(model)) as decode:
        assert decode.token_bytes == TOKEN_BYTES
        prefill.go(peers.sent("a"))
        peers.run(prefill, until=lambda: prefill.end("a") is not None)
        decode.go(peers.fetched("a", prefill))
        peers.run(prefill, decode, until=lambda: decode.end("a") is not None)
        assert decode.tokens("a") == peers.expected(model)
        assert peers.transferred(decode).num_bytes == 288 * TOKEN_BYTES


REFUSED: dict[str, dict[str, Any]] = {
    "--kv-cache-dtype int8 is not supported": {"cache": CacheConfig(kv_cache_dtype="int8")},
    "--tensor-parallel-size takes 1": {"tensor_parallel_size": 2},
}
"""Key words of the refusal, value what is asked for."""


@pytest.mark.parametrize("message", REFUSED)
def test_what_latents_cannot_have_is_refused(message: str, folder: Path) -> None:
    asked = dict(REFUSED[message])
    cache = asked.pop("cache", CacheConfig())
    config = EngineConfig(model=ModelConfig(model=str(folder), **asked), cache=cache)
    with pytest.raises(ConfigError, match=message):
        build_engine(config)


def test_a_gpu_refuses_latents(folder: Path) -> None:
    spec = open_checkpoint(ModelConfig(model=str(folder))).decoder_spec
    assert why_not_computed(spec) == "latent is LatentAttention, not none"


def hub_yarn(config: Config) -> Config:
    """The rope's parameters in two fields, and fields that transformers leaves out."""
    rope = without(config["rope_parameters"], "rope_theta", "rope_type")
    return without(config, "rope_parameters", "head_dim", "qk_head_dim") | {
        "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", **rope},
        "moe_layer_freq": 1,
        "scoring_func": "softmax" if config["model_type"] == "deepseek_v2" else "sigmoid",
    }


def kimi(config: Config) -> Config:
    return hub_yarn(config) | {"model_type": "kimi_k2", "num_nextn_predict_layers": 0}


def lite(config: Config) -> Config:
    return without(config, "head_dim", "rope_parameters") | {
        "n_group": 1,
        "topk_group": 1,
        "rope_scaling": None,
        "rope_theta": 10000,
    }


def with_further_layer(tensors: Tensors) -> Tensors:
    """DeepSeek-V3: a layer after the last that predicts further tokens."""
    names = ("eh_proj", "enorm", "shared_head.head", "mlp.experts.0.gate_proj")
    return tensors | {f"model.layers.3.{name}.weight": torch.ones(2, 2) for name in names}


LAYOUTS = {
    "DeepSeek-V2": Layout("deepseek-v2", hub_yarn),
    "DeepSeek-V2-Lite": Layout("deepseek-v2-lite", lite),
    "DeepSeek-V3": Layout("deepseek-v3", hub_yarn, with_further_layer),
    "DeepSeek-V3, fused": Layout("deepseek-v3", tensors=fused),
    "Kimi-K2": Layout("deepseek-v3", kimi),
    "Mistral Small 4": Layout(
        "mistral4",
        nested("Mistral3ForConditionalGeneration"),
        lambda tensors: renamed(r"^lm_head", "language_model.lm_head")(
            with_images("language_model.model.")(tensors)
        ),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits(LAYOUTS[name], tmp_path)


def test_a_further_layer_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_logits(LAYOUTS["DeepSeek-V3"], tmp_path)
    checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path)))
    with caplog.at_level("INFO"):
        load_model(checkpoint, dtype=torch.float32, device=CPU)
    assert "not used are layers.3" in caplog.text


def test_8_bit_floats_in_blocks(reference: PreTrainedModel, folder: Path, tmp_path: Path) -> None:
    """DeepSeek-V3 as published: every projection but the router's; blocks end within heads."""
    form = FORMATS["FP8 blocks"]
    tensors, values = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith(("_proj.weight", "_with_mqa.weight")):
            tensors[name] = values[name] = weight
            continue
        parts, values[name] = form.write(weight)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    config = json.loads((folder / "config.json").read_text())
    for path, contents, settings in (
        (tmp_path / "plain", values, config),
        (tmp_path / "quantized", tensors, config | {"quantization_config": form.config}),
    ):
        path.mkdir()
        save_file(contents, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(settings))
    dequantized = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    exact = reference_logits(dequantized.eval(), PROMPT)
    assert not torch.allclose(exact, reference_logits(reference, PROMPT), rtol=1e-2)
    assert_same_logits(logits_of(tmp_path / "quantized"), exact)


REFUSALS: dict[str, tuple[str, Config, str]] = {
    "choice": ("deepseek-v2", {"topk_method": "random"}, "unsupported topk_method 'random'"),
    "scores": ("deepseek-v2", {"scoring_func": "sigmoid"}, "unsupported scoring_func 'sigmoid'"),
    "weights": ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob is not supported"),
    "groups": (
        "deepseek-v3",
        {"n_group": 6, "topk_group": 3},
        "groups of 1 experts have no 2 best scores",
    ),
    "kinds": ("glm4-moe-lite", {"mlp_layer_types": ["dense"] * 2}, "has 2 entries for 3 layers"),
    "rank": ("deepseek-v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
    "odd": ("deepseek-v3", {"qk_rope_head_dim": 15}, "even rotary dimension, not 15"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_run_is_refused_by_name(name: str, tmp_path: Path) -> None:
    check_refused(Refusal(*REFUSALS[name]), tmp_path)


@pytest.mark.parametrize("name", LATENT_ARCHITECTURES)
def test_missing_fields_have_the_defaults_of_transformers(name: str, tmp_path: Path) -> None:
    kind = LATENT_ARCHITECTURES[name].model_type
    contents = {
        "architectures": [name],
        "model_type": kind,
        "vocab_size": 320,
        "hidden_size": 512,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        **({"num_experts_per_tok": 6} if kind == "deepseek_v2" else {}),
    }
    (tmp_path / "config.json").write_text(json.dumps(contents))
    theirs = AutoConfig.from_pretrained(tmp_path)
    _, ours = described(contents)
    latent = ours.attentions[0].latent
    assert latent is not None
    sizes = latent.q_rank, latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.value_dim
    assert sizes == tuple(
        getattr(theirs, name)
        for name in (
            *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
            "v_head_dim",
        )
    )
    assert ours.norm_eps == theirs.rms_norm_eps
    most = getattr(theirs, "index_topk", theirs.max_position_embeddings)
    assert ours.max_model_len == min(theirs.max_position_embeddings, most)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    experts = [layer.mlp for layer in ours.layers if isinstance(layer.mlp, MoeSpec)]
    if not hasattr(theirs, "n_routed_experts"):
        assert not experts
        return
    kinds = getattr(theirs, "mlp_layer_types", None)
    num_dense = theirs.first_k_dense_replace if kinds is None else kinds.count("dense")
    assert len(experts) == 5 - num_dense
    (own,) = {*experts}
    assert own.num_experts == theirs.n_routed_experts
    assert own.num_active == theirs.num_experts_per_tok
    assert (own.size, own.factor) == (theirs.moe_intermediate_size, theirs.routed_scaling_factor)
    assert own.shared_size == theirs.n_shared_experts * own.size
    assert own.is_normalized == theirs.norm_topk_prob
    assert (own.num_groups, own.num_active_groups) == (theirs.n_group or 1, theirs.topk_group or 1)
