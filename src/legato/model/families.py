"""How the decoders of each family differ from Llama: a function from config.json to a spec each."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from legato.core.errors import UnsupportedModelError
from legato.model.description import FULL, SLIDING, Description
from legato.model.mixer_spec import AttentionSpec, RecurrenceSpec
from legato.model.mlp_spec import Activation, MlpSpec
from legato.model.rope import RopeFrequencies, no_rope, rope_frequencies
from legato.model.spec import DecoderSpec, LayerSpec

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""Key a name in transformers, value ours."""


def llama(d: Description) -> DecoderSpec:
    """Describe Llama: the plain decoder, with biases if its configuration has them.

    Touvron et al., 2023, arXiv:2302.13971; Llama 3, 2024, arXiv:2407.21783.
    """
    return spec(
        d, attention=biases(d.attention_bias, d.attention_bias), mlp={"has_bias": d.mlp_bias}
    )


def mistral(d: Description) -> DecoderSpec:
    """Describe Mistral: Llama without biases, in some versions with windows in some or all layers.

    Jiang et al., 2023, arXiv:2310.06825.
    """
    return spec(d, windows=d.windows(d.sliding_window, num_full=0))


def qwen2(d: Description) -> DecoderSpec:
    """Describe Qwen2: Llama with biases on queries, keys and values, and windows in some layers.

    Qwen2 and Qwen2.5: Yang et al., 2024, arXiv:2407.10671.
    """
    return spec(d, windows=_late_windows(d), attention={"qkv_bias": True})


def qwen3(d: Description) -> DecoderSpec:
    """Describe Qwen3: Llama with queries and keys normalized a head, and windows in some layers.

    Yang et al., 2025, arXiv:2505.09388; the dense models.
    """
    attention = {**biases(d.attention_bias, d.attention_bias), "qk_norm": "head"}
    return spec(d, windows=_late_windows(d), attention=attention)


def ministral3(d: Description) -> DecoderSpec:
    """Describe Ministral 3: Mistral with YaRN, whose queries grow with their position."""
    windows = (d.sliding_window,) * d.num_hidden_layers
    return spec(d, windows=windows)


def phi3(d: Description) -> DecoderSpec:
    """Describe Phi-3 and Phi-4: Llama with fused projections, and rope on a part of each head.

    Abdin et al., 2024, arXiv:2404.14219. The type of its longrope has had several names.
    """
    parameters = d.rope
    if parameters["rope_type"] in ("su", "yarn"):
        length = d.original_max_position_embeddings
        parameters |= {"rope_type": "longrope", "original_max_position_embeddings": length}
    windows = (d.sliding_window,) * d.num_hidden_layers
    return spec(d, windows=windows, ropes=(_rope(d, parameters),))


def granite(d: Description, **layers: Any) -> DecoderSpec:
    """Describe Granite 3: Llama with factors on embeddings, attention, residuals and logits.

    Args:
        layers: further arguments of `spec`, for relatives.
    """
    return spec(
        d,
        **layers,
        attention={**biases(d.attention_bias, d.attention_bias), "scale": d.attention_multiplier},
        mlp={"has_bias": d.mlp_bias},
        layer={"residual_scale": d.residual_multiplier},
        embedding_scale=d.embedding_multiplier,
        logit_scale=1 / d.logits_scaling,
    )


def smollm3(d: Description) -> DecoderSpec:
    """Describe SmolLM3: Llama without positions in every fourth layer."""
    interval = d.no_rope_layer_interval
    turned = d.no_rope_layers or [int((i + 1) % interval != 0) for i in range(d.num_hidden_layers)]
    if len(turned) != d.num_hidden_layers:
        raise UnsupportedModelError(
            f"no_rope_layers has {len(turned)} entries for {d.num_hidden_layers} layers"
        )
    window = d.sliding_window if d.use_sliding_window else None
    if d.layer_types is None:
        windows = tuple(None if has_rope else window for has_rope in turned)
    else:
        windows = d.windows(window, num_full=0)
    return spec(
        d,
        windows=windows,
        ropes=(_rope(d, d.rope), no_rope(d.head_size)),
        rope_of_layer=[0 if has_rope else 1 for has_rope in turned],
        attention=biases(d.attention_bias, d.attention_bias),
        mlp={"has_bias": d.mlp_bias},
    )


def olmo2(d: Description) -> DecoderSpec:
    """Describe OLMo 2: norms after attention and MLP, and over all heads of queries and keys.

    OLMo team, 2025, arXiv:2501.00656.
    """
    attention = {**biases(d.attention_bias, d.attention_bias), "qk_norm": "whole"}
    return spec(d, attention=attention, layer={"order": "post"})


def olmo3(d: Description) -> DecoderSpec:
    """Describe OLMo 3: OLMo 2 with windows in three of four layers, whose rope is not stretched."""
    kinds = d.kinds(4)
    ropes = tuple(_rope(d, d.rope_of(kind, theta=d.rope_theta)) for kind in (FULL, SLIDING))
    attention = {**biases(d.attention_bias, d.attention_bias), "qk_norm": "whole"}
    return spec(
        d,
        windows=d.windows_of(kinds),
        ropes=ropes,
        rope_of_layer=[int(kind == SLIDING) for kind in kinds],
        attention=attention,
        layer={"order": "post"},
    )


def exaone4(d: Description) -> DecoderSpec:
    """Describe EXAONE 4: norms after attention and MLP; layers without windows have no positions.

    LG AI Research, 2025, arXiv:2507.11407. The small models have no windows, and positions in all
    layers.
    """
    interval = d.sliding_window_pattern if isinstance(d.sliding_window_pattern, int) else 4
    kinds = d.kinds(interval if d.sliding_window else 0)
    return spec(
        d,
        windows=d.windows_of(kinds),
        ropes=(_rope(d, d.rope), no_rope(d.head_size)),
        rope_of_layer=[int(bool(d.sliding_window) and kind == FULL) for kind in kinds],
        attention={"qk_norm": "head"},
        layer={"order": "post"},
    )


def glm4(d: Description) -> DecoderSpec:
    """Describe GLM-4-0414: norms before and after, and rope on neighbours in half of each head."""
    return spec(d, attention={"qkv_bias": d.attention_bias}, layer={"order": "sandwich"})


def seed_oss(d: Description) -> DecoderSpec:
    """Describe Seed-OSS: Llama with biases on queries, keys and values."""
    return spec(
        d,
        attention=biases(d.attention_bias, d.attention_out_bias),
        mlp={"has_bias": d.mlp_bias},
    )


def ernie4_5(d: Description) -> DecoderSpec:
    """Describe Ernie 4.5: Llama with rope on neighbours; the dense models."""
    return spec(d, attention=biases(d.use_bias, d.use_bias), mlp={"has_bias": d.use_bias})


def hunyuan(d: Description) -> DecoderSpec:
    """Describe Hunyuan: Llama with queries and keys normalized after rope; the dense models."""
    own = biases(d.attention_bias, d.attention_bias)
    return spec(d, attention={**own, "qk_norm": "head", "norm_after_rope": True})


def gemma2(d: Description) -> DecoderSpec:
    """Describe Gemma 2: norms before and after, GELU, soft caps, and windows in every other layer.

    Gemma team, 2024, arXiv:2408.00118.
    """
    return _gemma(d, kinds=d.kinds(2), ropes=(_rope(d, d.rope),))


def gemma3(d: Description) -> DecoderSpec:
    """Describe Gemma 3: Gemma 2 with normalized queries and keys, and rope by kind of layer.

    Gemma team, 2025, arXiv:2503.19786.
    """
    interval = d.sliding_window_pattern if isinstance(d.sliding_window_pattern, int) else 6
    full = d.rope_of(FULL, theta=d.rope_theta)
    sliding = d.rope_of(SLIDING, theta=d.rope_local_base_freq)
    return _gemma(
        d, kinds=d.kinds(interval), ropes=(_rope(d, full), _rope(d, sliding)), qk_norm="head"
    )


def cohere2(d: Description) -> DecoderSpec:
    """Describe Command R7B and Command A: parallel layers; those without windows lack positions.

    Cohere, 2025, arXiv:2504.00698.
    """
    interval = d.sliding_window_pattern if isinstance(d.sliding_window_pattern, int) else 4
    kinds = d.kinds(interval)
    has_rope = [kind == SLIDING and d.sliding_window is not None for kind in kinds]
    return spec(
        d,
        windows=d.windows_of(kinds),
        ropes=(_rope(d, d.rope), no_rope(d.head_size)),
        rope_of_layer=[0 if turns else 1 for turns in has_rope],
        attention=biases(d.attention_bias, d.attention_bias),
        layer={"order": "parallel"},
        norm="layer",
        norm_eps=d.layer_norm_eps,
        logit_scale=d.logit_scale,
    )


def starcoder2(d: Description) -> DecoderSpec:
    """Describe StarCoder 2: layer norms with biases, and an MLP without gates.

    Lozhkov et al., 2024, arXiv:2402.19173.
    """
    return spec(
        d,
        windows=(d.sliding_window,) * d.num_hidden_layers,
        attention=biases(d.use_bias, d.use_bias),
        mlp={"has_bias": d.use_bias, "is_gated": False},
        norm="layer",
        norm_bias=True,
        norm_eps=d.norm_epsilon,
    )


def gpt_neox(d: Description) -> DecoderSpec:
    """Describe GPT-NeoX and Pythia: parallel layers with two norms, and rope on a part of a head.

    Black et al., 2022, arXiv:2204.06745; Biderman et al., 2023, arXiv:2304.01373.
    """
    return spec(
        d,
        ropes=(_rope(d, _neox_rope(d)),),
        attention={
            **biases(d.attention_bias, d.attention_bias),
            "num_kv_heads": d.num_attention_heads,
        },
        mlp={"has_bias": True, "is_gated": False},
        layer={"order": "parallel_two" if d.use_parallel_residual else "pre"},
        norm="layer",
        norm_bias=True,
        norm_eps=d.layer_norm_eps,
    )


def apertus(d: Description) -> DecoderSpec:
    """Describe Apertus: Llama with normalized queries and keys, and xIELU without gates.

    Swiss AI, 2025, arXiv:2509.14233.
    """
    attention = {**biases(d.attention_bias, d.attention_bias), "qk_norm": "head"}
    return spec(d, attention=attention, mlp={"is_gated": False})


def arcee(d: Description) -> DecoderSpec:
    """Describe AFM: Llama with a squared ReLU without gates."""
    return spec(
        d,
        attention=biases(d.attention_bias, d.attention_bias),
        mlp={"has_bias": d.mlp_bias, "is_gated": False},
    )


def _gemma(
    d: Description,
    *,
    kinds: Sequence[str],
    ropes: tuple[RopeFrequencies, ...],
    **attention: Any,
) -> DecoderSpec:
    if d.use_bidirectional_attention:
        raise UnsupportedModelError("attention to later tokens is not supported")
    return spec(
        d,
        windows=d.windows_of(kinds),
        ropes=ropes,
        rope_of_layer=[int(kind == SLIDING) % len(ropes) for kind in kinds],
        attention={
            **biases(d.attention_bias, d.attention_bias),
            "scale": d.query_pre_attn_scalar**-0.5,
            "softcap": d.attn_logit_softcapping,
            **attention,
        },
        layer={"order": "sandwich"},
        embedding_scale=d.hidden_size**0.5,
        logit_softcap=d.final_logit_softcapping,
    )


def spec(
    d: Description,
    *,
    windows: Sequence[int | None] | None = None,
    ropes: tuple[RopeFrequencies, ...] | None = None,
    rope_of_layer: Sequence[int] | None = None,
    recurrence: RecurrenceSpec | None = None,
    has_attention: Sequence[bool] | None = None,
    attention: Mapping[str, Any] | None = None,
    mlp: Mapping[str, Any] | None = None,
    layer: Mapping[str, Any] | None = None,
    **whole: Any,
) -> DecoderSpec:
    """Build a spec from the fields that all families share; the arguments say what differs.

    Args:
        windows: of each layer; None if no layer has one.
        ropes: None for the rope that the description has.
        rope_of_layer: index of each layer's rope; None for the first.
        recurrence: the mixer of layers without attention.
        has_attention: of each layer; None if all have.
        attention, mlp, layer, whole: fields of these records that differ from the defaults.

    Raises:
        UnsupportedModelError: an activation or rope type that Legato does not know.
    """
    name = d.hidden_activation or d.hidden_act
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"unsupported activation {name!r}; Legato supports {', '.join(_ACTIVATIONS)}"
        )
    size = d.head_size
    own_mlp = {
        "size": d.shared_intermediate_size or d.intermediate_size,
        "activation": _ACTIVATIONS[name],
        **(mlp or {}),
    }
    heads = {
        "num_heads": d.num_attention_heads,
        "num_kv_heads": d.num_key_value_heads or d.num_attention_heads,
        "head_dim": size,
        "scale": size**-0.5,
        **(attention or {}),
    }
    num_layers = d.num_hidden_layers
    known_ropes = ropes or (_rope(d, d.rope),)
    rope_indices = rope_of_layer or (0,) * num_layers
    used = sorted(set(rope_indices))
    layers = (
        LayerSpec(
            attention=(
                AttentionSpec(window=window, rope=used.index(rope), **heads) if attends else None
            ),
            recurrence=None if attends else recurrence,
            mlp=MlpSpec(**own_mlp),
            **(layer or {}),
        )
        for window, rope, attends in zip(
            windows or (None,) * num_layers,
            rope_indices,
            has_attention or (True,) * num_layers,
            strict=True,
        )
    )
    fields = {
        "norm_eps": d.rms_norm_eps,
        "tie_word_embeddings": d.tie_word_embeddings,
        **whole,
    }
    return DecoderSpec(
        vocab_size=d.vocab_size,
        hidden_size=d.hidden_size,
        max_model_len=d.max_position_embeddings,
        ropes=tuple(known_ropes[index] for index in used),
        layers=tuple(layers),
        **fields,
    )


def _rope(d: Description, parameters: dict[str, Any]) -> RopeFrequencies:
    return rope_frequencies(parameters, d.head_size, d.max_position_embeddings, d.served_len)


def check_kinds(d: Description, kinds: Sequence[str], known: Set[str]) -> None:
    """Raises `UnsupportedModelError` for layers of an unknown type, or for another number of them.

    Args:
        kinds: of the layers, as in `layer_types`.
    """
    if unknown := set(kinds) - known:
        raise UnsupportedModelError(f"unsupported layer types {', '.join(sorted(unknown))}")
    if len(kinds) != d.num_hidden_layers:
        raise UnsupportedModelError(
            f"layer_types has {len(kinds)} entries for {d.num_hidden_layers} layers"
        )


def biases(qkv: bool, output: bool) -> dict[str, bool]:
    return {"qkv_bias": qkv, "output_bias": output}


def _late_windows(d: Description) -> tuple[int | None, ...]:
    window = d.sliding_window if d.use_sliding_window else None
    return d.windows(window, num_full=d.max_window_layers)


def _neox_rope(d: Description) -> dict[str, Any]:
    older = {"rope_theta": d.rotary_emb_base, "partial_rotary_factor": d.rotary_pct}
    return {**d.rope, **older, **(d.rope_scaling or d.rope_parameters or {})}
