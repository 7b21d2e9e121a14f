"""The supported architectures: names in config.json, defaults, and layouts of checkpoints."""

from collections.abc import Mapping
from typing import Any

from legato.core.errors import UnsupportedModelError
from legato.model import families
from legato.model.architecture import Architecture, mistral_yarn
from legato.model.description import Description, keys_of
from legato.model.expert_architectures import EXPERT_ARCHITECTURES, HUNYUAN_IMPLIED
from legato.model.gemma4 import GEMMA4_ARCHITECTURES
from legato.model.latent_architectures import LATENT_ARCHITECTURES
from legato.model.llama4 import LLAMA4_ARCHITECTURES
from legato.model.mixer_spec import DeltaNetSpec
from legato.model.mlp_spec import MoeSpec
from legato.model.recurrent_architectures import RECURRENT_ARCHITECTURES
from legato.model.rope import rotary_order
from legato.model.spec import DecoderSpec
from legato.model.transforms import (
    Transform,
    add_one_to_norms,
    drop,
    rename,
    reorder_heads,
    split,
    split_experts,
)
from legato.model.wrappers import NAMES, OUTER, TEXT_TYPES, TIED, part_of, wrapper_of

_POST_NAMES = {
    "post_attention_layernorm": "attention_output_layernorm",
    "post_feedforward_layernorm": "mlp_output_layernorm",
}
_GEMMA_NAMES = {**_POST_NAMES, "pre_feedforward_layernorm": "post_attention_layernorm"}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
_OLMO = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_GRANITE = {"max_position_embeddings": 2048}

ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", families.llama, {"max_position_embeddings": 2048}),
    "MistralForCausalLM": Architecture(
        "mistral",
        families.mistral,
        {"max_position_embeddings": 2**17, "num_key_value_heads": 8},
    ),
    "Ministral3ForCausalLM": Architecture(
        "ministral3",
        families.ministral3,
        {
            "max_position_embeddings": 2**18,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": mistral_yarn(1e6, 16.0, 16384),
        },
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", families.qwen2, {"max_position_embeddings": 2**15, "num_key_value_heads": 32}
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        families.qwen3,
        {"max_position_embeddings": 2**15, "num_key_value_heads": 32, "head_dim": 128},
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3",
        families.phi3,
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        fused=("qkv_proj", "gate_up_proj"),
        has_partial_rope=True,
        implied={"full_attn_mod": (1,), "interpolate_factor": (1,)},
    ),
    "GraniteForCausalLM": Architecture("granite", families.granite, _GRANITE),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        families.smollm3,
        {
            "max_position_embeddings": 2**15,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
        implied={"max_window_layers": ()},
    ),
    "Olmo2ForCausalLM": Architecture("olmo2", families.olmo2, _OLMO, names=_POST_NAMES),
    "Olmo3ForCausalLM": Architecture(
        "olmo3", families.olmo3, {**_OLMO, "rope_theta": 5e5}, names=_POST_NAMES
    ),
    "Exaone4ForCausalLM": Architecture(
        "exaone4",
        families.exaone4,
        {"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5},
        names=_POST_NAMES,
    ),
    "Glm4ForCausalLM": Architecture(
        "glm4",
        families.glm4,
        {
            "max_position_embeddings": 2**17,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        names={
            "post_self_attn_layernorm": "attention_output_layernorm",
            "post_mlp_layernorm": "mlp_output_layernorm",
        },
        fused=("gate_up_proj",),
        has_partial_rope=True,
        is_interleaved=True,
    ),
    "SeedOssForCausalLM": Architecture(
        "seed_oss",
        families.seed_oss,
        {
            "max_position_embeddings": 2**19,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
        },
    ),
    "Ernie4_5ForCausalLM": Architecture(
        "ernie4_5",
        families.ernie4_5,
        {
            "max_position_embeddings": 2**17,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
        is_interleaved=True,
        implied={"weight_share_add_bias": (True,)},
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        "hunyuan_v1_dense",
        families.hunyuan,
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        names={"query_layernorm": "q_norm", "key_layernorm": "k_norm"},
        implied=HUNYUAN_IMPLIED,
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2",
        families.gemma2,
        {
            **_GEMMA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        names=_GEMMA_NAMES,
        adds_one=True,
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma3_text",
        families.gemma3,
        {
            **_GEMMA,
            "vocab_size": 262_208,
            "max_position_embeddings": 2**17,
            "rope_theta": 1e6,
        },
        names=_GEMMA_NAMES,
        adds_one=True,
    ),
    **GEMMA4_ARCHITECTURES,
    "Cohere2ForCausalLM": Architecture(
        "cohere2",
        families.cohere2,
        {"max_position_embeddings": 8192, "tie_word_embeddings": True},
        is_interleaved=True,
        implied={
            "layer_switch": (4,),
            "order_of_interleaved_layers": ("local_attn_first",),
            "position_embedding_type": ("rope_gptj",),
            "rotary_pct": (1,),
            "use_embedding_sharing": (True,),
            "use_gated_activation": (True,),
            "use_parallel_block": (True,),
            "use_parallel_embedding": (False,),
            "use_qk_norm": (False,),
        },
    ),
    "Starcoder2ForCausalLM": Architecture(
        "starcoder2",
        families.starcoder2,
        {
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "sliding_window": None,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        names={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"},
        implied={
            "activation_function": ("gelu_pytorch_tanh",),
            "mlp_type": ("default",),
            "norm_type": ("layer_norm",),
            "scale_attn_weights": (True,),
        },
    ),
    "GPTNeoXForCausalLM": Architecture(
        "gpt_neox",
        families.gpt_neox,
        {"max_position_embeddings": 2048, "hidden_act": "gelu", "attention_bias": True},
        names={
            "gpt_neox": "model",
            "embed_in": "embed_tokens",
            "embed_out": "lm_head",
            "final_layer_norm": "norm",
            "attention.query_key_value": "self_attn.qkv_proj",
            "attention.dense": "self_attn.o_proj",
            "dense_h_to_4h": "up_proj",
            "dense_4h_to_h": "down_proj",
        },
        fused=("qkv_proj",),
        is_fused_by_head=True,
        unused=("attention.bias", "attention.masked_bias"),
        has_partial_rope=True,
    ),
    "ApertusForCausalLM": Architecture(
        "apertus",
        families.apertus,
        {
            "max_position_embeddings": 2**16,
            "hidden_act": "xielu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 12e6,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12e6,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
        names={
            "attention_layernorm": "input_layernorm",
            "feedforward_layernorm": "post_attention_layernorm",
        },
        implied={"post_norm": (False,), "qk_norm": (True,)},
    ),
    "ArceeForCausalLM": Architecture(
        "arcee",
        families.arcee,
        {"max_position_embeddings": 4096, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
    ),
    **EXPERT_ARCHITECTURES,
    **LATENT_ARCHITECTURES,
    **LLAMA4_ARCHITECTURES,
    **RECURRENT_ARCHITECTURES,
}
"""Key a name in a configuration's `architectures`."""

_HEADLESS = ("ForSequenceClassification", "Model")
"""Ends of the names of architectures without an output projection."""


def generates(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's architecture has an output projection."""
    name = (config.get("architectures") or [""])[0]
    return not isinstance(name, str) or not name.endswith(_HEADLESS)


def _causal_names(model_type: object) -> list[str]:
    """Return the architecture of a model type, as a list; empty if there is none."""
    return [
        name
        for name, known in ARCHITECTURES.items()
        if model_type in (known.model_type, *known.other_types)
    ]


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the description of the text model, which may be a part of config.json.

    A decoder without an output projection, or with another head, is described as one with it. Keys
    that a part lacks may be at the top; of a key in both, the part's goes first, except `OUTER`.
    """
    wrapper = wrapper_of(config)
    if wrapper is None:
        known = () if generates(config) else _causal_names(config.get("model_type"))
        return {**config, "architectures": known} if known else config
    part = part_of(config)
    text = config[part] if part else config
    kind = text.get("model_type", config.get("model_type"))
    kind = TEXT_TYPES.get(str(kind), kind)
    names = _causal_names(kind)
    named = keys_of(ARCHITECTURES[names[0]].keys).keys() if names else ()
    shared = {key: config[key] for key in config if key in OUTER or (key in named - text.keys())}
    own = {"architectures": names or [str(kind)], "model_type": kind}
    tied = {TIED: True} if any(given.get(TIED) is True for given in (text, config)) else {}
    return {**wrapper.keys, **text, **shared, **tied, **own}


def check_supported(config: dict[str, Any]) -> None:
    """Reject models that Legato cannot run.

    Args:
        config: from `text_config`.

    Raises:
        UnsupportedModelError: an unknown architecture.
    """
    names = config.get("architectures") or ["(none named)"]
    if names[0] not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"unsupported architecture {names[0]}; Legato supports {', '.join(ARCHITECTURES)}"
        )
    if config.get("is_causal") is False:
        raise UnsupportedModelError("attention to later tokens (is_causal: false) is not supported")
    known = ARCHITECTURES[names[0]]
    if config.get("model_type") not in (known.model_type, *known.other_types):
        raise UnsupportedModelError(
            f"model_type is {config.get('model_type')!r}, but {names[0]} is {known.model_type!r}"
        )


def described(
    contents: dict[str, Any], served_len: int | None = None
) -> tuple[Description, DecoderSpec]:
    """Return a supported model's description and the spec of its decoder.

    Args:
        contents: of config.json, or the same fields from other metadata.
        served_len: positions that are served; None for all that the model was made for.

    Raises:
        UnsupportedModelError: a setting that Legato does not know, or an impossible value.
        msgspec.ValidationError: a field is missing, or of another type.
    """
    architecture = ARCHITECTURES[contents["architectures"][0]]
    description = architecture.keys({**architecture.defaults, **contents}, served_len)
    spec = architecture.spec(description)
    spec.check()
    is_partial = any(0 < rope.inverse.count(0.0) < len(rope.inverse) for rope in spec.ropes)
    if is_partial and not (architecture.has_partial_rope or architecture.has_proportional_rope):
        raise UnsupportedModelError("rope on only a part of each head is not supported")
    return description, spec


def transforms(
    config: dict[str, Any], spec: DecoderSpec, *, adds_one: bool = True
) -> list[Transform]:
    """Return the transforms of a checkpoint's tensors.

    Args:
        config: contents of config.json.
        adds_one: whether norms are stored minus 1 in families that do so.
    """
    text = text_config(config)
    architecture = ARCHITECTURES[text["architectures"][0]]
    found: list[Transform] = []
    wrapper = wrapper_of(config)
    if wrapper is not None:
        found += [drop(prefixes=wrapper.prefixes), rename(NAMES)]
    prefixes = architecture.unused_prefixes + _extra_layers(text, spec) + _unread(spec)
    if prefixes or architecture.unused:
        found.append(drop(prefixes=prefixes, suffixes=architecture.unused))
    renamed = architecture.names, architecture.names_of(spec)
    found += [rename(names) for names in renamed if names]
    attention = spec.attentions[0]
    if "qkv_proj" in architecture.fused:
        sizes = {
            "q_proj": attention.query_size,
            "k_proj": attention.kv_size,
            "v_proj": attention.kv_size,
        }
        groups = attention.num_kv_heads if architecture.is_fused_by_head else 1
        found.append(split("qkv_proj", sizes, num_groups=groups))
    experts = next((moe for layer in spec.layers if (moe := layer.moe) is not None), None)
    if experts is not None:
        found.append(
            split_experts(
                experts,
                spec.hidden_size,
                alternates=architecture.has_transposed_experts,
                may_transpose=architecture.may_transpose_experts
                or (wrapper is not None and wrapper.may_transpose_experts),
            )
        )
    if "q_proj" in architecture.fused and attention.has_gate:
        sizes = {"q_proj": attention.query_size, "gate_proj": attention.query_size}
        found.append(split("q_proj", sizes, num_groups=attention.num_heads))
    found += _delta_net_splits(spec)
    if "gate_up_proj" in architecture.fused:
        size = _mlp_size(spec)
        found.append(split("gate_up_proj", {"gate_proj": size, "up_proj": size}))
    if not architecture.has_proportional_rope:
        is_interleaved = text.get("rope_interleave", True) and architecture.is_interleaved
        found += _rotary_reorders(spec, is_interleaved=is_interleaved)
    if architecture.adds_one and adds_one:
        found.append(add_one_to_norms(plain_norms=("recurrence.norm.weight",)))
    return found


def _mlp_size(spec: DecoderSpec) -> int:
    """Return the width of the layers' MLPs; in layers with experts, of the MLPs for all rows."""
    own = (layer.mlp for layer in spec.layers)
    mlps = (mlp.shared if isinstance(mlp, MoeSpec) else mlp for mlp in own)
    return next(mlp.size for mlp in mlps if mlp is not None)


def _extra_layers(config: Mapping[str, Any], spec: DecoderSpec) -> tuple[str, ...]:
    """Return how the names of the layers begin that predict further tokens."""
    count = config.get("num_nextn_predict_layers")
    if not isinstance(count, int):
        return ()
    return tuple(f"model.layers.{spec.num_layers + i}." for i in range(count))


def _rotary_reorders(spec: DecoderSpec, *, is_interleaved: bool) -> list[Transform]:
    """Return what brings rows to the order that rope needs; nothing if they have it."""
    attention = spec.attentions[0]
    turned = max(len(rope.inverse) - rope.inverse.count(0.0) for rope in spec.ropes)
    order = rotary_order(attention.rope_size, 2 * turned, is_interleaved=is_interleaved)
    if not turned or order == sorted(order):
        return []
    latent = attention.latent
    if latent is None:
        return [reorder_heads(order)]
    # The rows that rotate are the last of a head's query, and of the projection into latents.
    return [
        reorder_heads([*range(first), *(first + row for row in order)], modules)
        for first, modules in (
            (latent.nope_dim, ("q_proj", "q_b_proj")),
            (latent.kv_rank, ("kv_a_proj_with_mqa",)),
        )
    ]


def _unread(spec: DecoderSpec) -> tuple[str, ...]:
    """Return how the names begin of keys and values that layers have, but do not compute."""
    return tuple(
        f"model.layers.{index}.self_attn.{part}."
        for index, layer in enumerate(spec.layers)
        if layer.attention is not None and layer.attention.kv_from is not None
        for part in ("k_proj", "v_proj", "k_norm")
    )


def _delta_net_splits(spec: DecoderSpec) -> list[Transform]:
    """Return the splits of fused projections of gated delta nets, whichever a checkpoint has."""
    nets = [net for layer in spec.layers if isinstance(net := layer.recurrence, DeltaNetSpec)]
    if not nets:
        return []
    own = nets[0]
    qkv = {"in_proj_q": own.key_size, "in_proj_k": own.key_size, "in_proj_v": own.value_size}
    splits = {
        "in_proj_qkv": (qkv, 1),
        "in_proj_qkvz": (qkv | {"in_proj_z": own.value_size}, own.num_key_heads),
        "in_proj_ba": (
            {"in_proj_b": own.num_heads, "in_proj_a": own.num_heads},
            own.num_key_heads,
        ),
    }
    return [
        split(module, sizes, num_groups=num_groups)
        for module, (sizes, num_groups) in splits.items()
    ]
