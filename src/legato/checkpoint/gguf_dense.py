"""The GGUF architectures without experts, beyond those of `gguf_architectures`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from legato.checkpoint.gguf_architectures import (
    ARCHITECTURES,
    CONVOLUTIONS,
    LOG_RATES,
    MAMBA2_NAMES,
    VECTORS,
    GGUFArchitecture,
    common_config,
    layer_counts,
    without_predictors,
)
from legato.checkpoint.gguf_file import GGUFFile
from legato.core.errors import UnsupportedModelError
from legato.model.description import FULL, SLIDING
from legato.model.spec import DecoderSpec
from legato.model.transforms import Named, Transform, Weight, split

Config = Callable[[GGUFFile], dict[str, Any]]


def named(architecture: str, **tensors: str) -> Config:
    """Return a function that describes a family by the keys that most families read.

    Args:
        architecture: as in config.json.
        tensors: key of config.json that is true if the first layer has the tensor.
    """

    def config(file: GGUFFile) -> dict[str, Any]:
        found = {key: has_tensor(file, name) for key, name in tensors.items()}
        return {**common_config(file), "architectures": [architecture], **found}

    return config


def has_tensor(file: GGUFFile, name: str) -> bool:
    """Whether the first layer has a tensor; that of queries may be fused with keys' and values'."""
    fused = name.replace("attn_q.", "attn_qkv.")
    return any(f"blk.0.{own}" in file.tensors for own in (name, fused))


def yarn_with_growth(file: GGUFFile, rope: dict[str, Any], log_factor: float) -> dict[str, Any]:
    """Add Mistral's and DeepSeek's factors on scores and queries to rope parameters.

    Args:
        log_factor: the file's yarn_log_multiplier as a multiple of mscale_all_dim.
    """
    scale = file.get("rope.scaling.yarn_log_multiplier")
    rate = file.get("attention.temperature_scale")
    length = file.get("attention.temperature_length")
    if rate and length and length != rope.get("original_max_position_embeddings"):
        raise UnsupportedModelError(
            f"{file.path}: temperature_length is {length}, and the context before YaRN is "
            f"{rope.get('original_max_position_embeddings')}"
        )
    if rate:
        rope = {**rope, "llama_4_scaling_beta": rate}
    if not scale or rope["rope_type"] != "yarn":
        return rope
    return {**rope, "mscale_all_dim": scale / log_factor}


def _mistral3_config(file: GGUFFile) -> dict[str, Any]:
    """Describe Ministral 3, whose YaRN has a temperature of 1 times the usual one."""
    contents = named("Ministral3ForCausalLM")(file)
    rope = yarn_with_growth(file, contents["rope_parameters"], 1.0)
    return contents | {"rope_parameters": {**rope, "mscale": 1.0}}


def _olmo2_config(file: GGUFFile) -> dict[str, Any]:
    """Describe OLMo 2, or OLMo 3 if there is a window; layers with it do not stretch their rope."""
    contents = named("Olmo2ForCausalLM", attention_bias="attn_q.bias")(file)
    if not file.get("attention.sliding_window"):
        return contents
    full = contents["rope_parameters"]
    if file.get("rope.scaling.yarn_attn_factor"):
        # OLMo's file has the whole factor.
        full = {**full, "attention_factor": file.get("rope.scaling.yarn_attn_factor")}
    theta = file.get("rope.freq_base_swa", full["rope_theta"])
    sliding = {"rope_type": "default", "rope_theta": theta}
    return {
        **contents,
        **_windows(file, contents, interval=4),
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": {FULL: full, SLIDING: sliding},
    }


def _exaone4_config(file: GGUFFile) -> dict[str, Any]:
    contents = named("Exaone4ForCausalLM")(file) | layer_counts(file)
    if not file.get("attention.sliding_window"):
        kinds = [FULL] * contents["num_hidden_layers"]
        return {**contents, "sliding_window": None, "layer_types": kinds}
    return contents | _windows(file, contents, interval=4)


def _cohere2_config(file: GGUFFile) -> dict[str, Any]:
    contents = named("Cohere2ForCausalLM", attention_bias="attn_q.bias")(file)
    scale = file.get("logit_scale", 1.0)
    return {**contents, **_windows(file, contents, interval=4), "logit_scale": scale}


def _windows(file: GGUFFile, contents: Mapping[str, Any], *, interval: int) -> dict[str, Any]:
    """Return the window, and the kinds of layers.

    Args:
        interval: every so many-th layer has full attention, if the file does not say which.
    """
    num_layers = contents["num_hidden_layers"]
    pattern = file.get("attention.sliding_window_pattern", interval)
    if isinstance(pattern, int):
        pattern = [(i + 1) % pattern != 0 for i in range(num_layers)] if pattern else []
    kinds = [SLIDING if has_window else FULL for has_window in pattern[:num_layers]]
    return {"sliding_window": file.needed("attention.sliding_window"), "layer_types": kinds}


def _glm4_config(file: GGUFFile) -> dict[str, Any]:
    """Describe GLM-4; files for images have rows of heads in halves."""
    return {
        **named("Glm4ForCausalLM", attention_bias="attn_q.bias")(file),
        **layer_counts(file),
        "rope_interleave": not file.get("rope.dimension_sections"),
    }


def _starcoder2_config(file: GGUFFile) -> dict[str, Any]:
    contents = named("Starcoder2ForCausalLM", use_bias="attn_q.bias")(file)
    contents["norm_epsilon"] = contents.pop("layer_norm_eps")
    return contents


def _gpt_neox_config(file: GGUFFile) -> dict[str, Any]:
    contents = named("GPTNeoXForCausalLM", attention_bias="attn_qkv.bias")(file)
    rope = contents["rope_parameters"]
    return {
        **contents,
        "rotary_pct": rope.get("partial_rotary_factor", 1.0),
        "rotary_emb_base": rope["rope_theta"],
        "use_parallel_residual": file.get("use_parallel_residual", True),
    }


def split_parts(_: GGUFFile, spec: DecoderSpec) -> list[Transform]:
    """Split queries, keys and values: each of all heads, unlike in transformers' checkpoints."""
    own = spec.attentions[0]
    sizes = {"q_proj": own.query_size, "k_proj": own.kv_size, "v_proj": own.kv_size}
    return [split("parts", sizes)]


def _apertus_config(file: GGUFFile) -> dict[str, Any]:
    file.read_keys |= set(_XIELU.values())
    return named("ApertusForCausalLM", attention_bias="attn_q.bias")(file)


_XIELU = {name: f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}
"""Key a weight of the activation, value the metadata key of a number for each layer."""


def _activations(file: GGUFFile, _: DecoderSpec) -> list[Transform]:
    """Add the weights of activations, which are metadata, beside each layer's last projection."""

    def apply(name: str, weight: Weight) -> list[Named]:
        parent, _, part = name.rpartition(".mlp.")
        if part != "down_proj.weight":
            return [(name, weight)]
        layer = int(parent.rpartition(".")[2])
        numbers = {key: torch.tensor(file.metadata[own][layer]) for key, own in _XIELU.items()}
        added = (
            (f"{parent}.mlp.act_fn.{key}", number[None] if key.startswith("alpha") else number)
            for key, number in numbers.items()
        )
        return [(name, weight), *added]

    return [apply]


def _minicpm_config(file: GGUFFile) -> dict[str, Any]:
    """Describe MiniCPM, which is Granite with other factors; old files have none of them."""
    contents = named("GraniteForCausalLM", attention_bias="attn_q.bias", mlp_bias="ffn_up.bias")(
        file
    )
    depth = 1.4 / contents["num_hidden_layers"] ** 0.5
    return contents | {
        "attention_multiplier": contents["head_dim"] ** -0.5,
        "embedding_multiplier": file.get("embedding_scale", 12.0),
        "residual_multiplier": file.get("residual_scale", depth),
        "logits_scaling": file.get("logit_scale", contents["hidden_size"] / 256),
    }


def _falcon_h1_config(file: GGUFFile) -> dict[str, Any]:
    """Describe Falcon-H1, whose factors are part of the file's weights."""
    size, num_heads = file.needed("ssm.inner_size"), file.needed("ssm.time_step_rank")
    return {
        **named(
            "FalconH1ForCausalLM",
            attention_bias="attn_q.bias",
            mlp_bias="ffn_up.bias",
            mamba_conv_bias="ssm_conv1d.bias",
            mamba_proj_bias="ssm_in.bias",
            projectors_bias="ssm_out.bias",
            mamba_rms_norm="ssm_norm.weight",
        )(file),
        "mamba_norm_before_gate": False,
        "mamba_d_ssm": size,
        "mamba_n_heads": num_heads,
        "mamba_d_head": size // num_heads,
        "mamba_n_groups": file.needed("ssm.group_count"),
        "mamba_d_state": file.needed("ssm.state_size"),
        "mamba_d_conv": file.needed("ssm.conv_kernel"),
    }


_BARE_NORM = dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "post_attention_layernorm.weight")
"""Falcon-H1's second norm, which converters write without an ending."""
_POST_NORMS = {
    "post_attention_norm": "attention_output_layernorm",
    "post_ffw_norm": "mlp_output_layernorm",
}

_LLAMA = named("LlamaForCausalLM", attention_bias="attn_q.bias", mlp_bias="ffn_up.bias")

DENSE = {
    "exaone": GGUFArchitecture(_LLAMA),
    "internlm2": GGUFArchitecture(_LLAMA, has_paired_rows=True),
    "mistral3": GGUFArchitecture(_mistral3_config, has_paired_rows=True),
    "qwen2vl": ARCHITECTURES["qwen2"],
    "qwen3vl": ARCHITECTURES["qwen3"],
    "smollm3": GGUFArchitecture(
        named("SmolLM3ForCausalLM", attention_bias="attn_q.bias", mlp_bias="ffn_up.bias"),
        has_paired_rows=True,
    ),
    "arcee": GGUFArchitecture(
        named("ArceeForCausalLM", attention_bias="attn_q.bias", mlp_bias="ffn_up.bias"),
        has_paired_rows=True,
    ),
    "olmo2": GGUFArchitecture(_olmo2_config, _POST_NORMS),
    "exaone4": GGUFArchitecture(_exaone4_config, _POST_NORMS, without_predictors),
    "glm4": GGUFArchitecture(
        _glm4_config, _POST_NORMS | {"ffn_up": "mlp.gate_up_proj"}, without_predictors
    ),
    "seed_oss": GGUFArchitecture(
        named(
            "SeedOssForCausalLM",
            attention_bias="attn_q.bias",
            attention_out_bias="attn_output.bias",
        ),
        {"post_attention_norm": "post_attention_layernorm"},
    ),
    "ernie4_5": GGUFArchitecture(named("Ernie4_5ForCausalLM", use_bias="attn_q.bias")),
    "hunyuan-dense": GGUFArchitecture(
        named("HunYuanDenseV1ForCausalLM", attention_bias="attn_q.bias")
    ),
    "hunyuan_vl": GGUFArchitecture(
        named("HunYuanDenseV1ForCausalLM", attention_bias="attn_q.bias")
    ),
    "cohere2": GGUFArchitecture(_cohere2_config),
    "starcoder2": GGUFArchitecture(_starcoder2_config),
    "gptneox": GGUFArchitecture(_gpt_neox_config, {"attn_qkv": "self_attn.parts"}, split_parts),
    "minicpm": GGUFArchitecture(_minicpm_config, has_paired_rows=True),
    "apertus": GGUFArchitecture(_apertus_config, changes=_activations),
    "falcon-h1": GGUFArchitecture(
        _falcon_h1_config, MAMBA2_NAMES | _BARE_NORM, lambda *_: [LOG_RATES, VECTORS, CONVOLUTIONS]
    ),
}
"""Key `general.architecture`."""
