"""The dense families: for each, the keys of config.json that it reads and how it makes a spec."""

from collections.abc import Sequence
from typing import Any

from legato.core.errors import UnsupportedModelError
from legato.model.description import FULL, SLIDING, Biased, Plain, Rotary, Windowed
from legato.model.rope import RopeFrequencies, no_rope
from legato.model.spec import DecoderSpec
from legato.model.spec_builder import rope, spec


class Llama(Biased):
    mlp_bias: bool = False


def llama(d: Llama) -> DecoderSpec:
    """Describe Llama: the plain decoder, with biases if its configuration has them.

    Touvron et al., 2023, arXiv:2302.13971; Llama 3, 2024, arXiv:2407.21783.
    """
    return spec(d)


class Mistral(Plain, Windowed): ...


def mistral(d: Mistral) -> DecoderSpec:
    """Describe Mistral: Llama without biases, in some versions with windows in some or all layers.

    Jiang et al., 2023, arXiv:2310.06825.
    """
    return spec(d, windows=d.windows(d.sliding_window, num_full=0))


class Qwen2(Mistral):
    use_sliding_window: bool = False
    max_window_layers: int = 28


def qwen2(d: Qwen2) -> DecoderSpec:
    """Describe Qwen2: Llama with biases on queries, keys and values, and windows in some layers.

    Qwen2 and Qwen2.5: Yang et al., 2024, arXiv:2407.10671.
    """
    return spec(d, windows=_late_windows(d), attention={"qkv_bias": True})


class Qwen3(Qwen2, Biased): ...


def qwen3(d: Qwen3) -> DecoderSpec:
    """Describe Qwen3: Llama with queries and keys normalized a head, and windows in some layers.

    Yang et al., 2025, arXiv:2505.09388; the dense models.
    """
    return spec(d, windows=_late_windows(d), attention={"qk_norm": "head"})


class Ministral3(Plain):
    sliding_window: int | None = None


def ministral3(d: Ministral3) -> DecoderSpec:
    """Describe Ministral 3: Mistral with YaRN, whose queries grow with their position."""
    windows = (d.sliding_window,) * d.num_hidden_layers
    return spec(d, windows=windows)


class Phi3(Plain):
    sliding_window: int | None = None


def phi3(d: Phi3) -> DecoderSpec:
    """Describe Phi-3 and Phi-4: Llama with fused projections, and rope on a part of each head.

    Abdin et al., 2024, arXiv:2404.14219. The type of its longrope has had several names.
    """
    parameters = d.rope
    if parameters["rope_type"] in ("su", "yarn"):
        length = d.original_max_position_embeddings
        parameters |= {"rope_type": "longrope", "original_max_position_embeddings": length}
    windows = (d.sliding_window,) * d.num_hidden_layers
    return spec(d, windows=windows, ropes=(rope(d, parameters),))


class Granite(Llama):
    attention_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


def granite(d: Granite, **layers: Any) -> DecoderSpec:
    """Describe Granite 3: Llama with factors on embeddings, attention, residuals and logits.

    Args:
        layers: further arguments of `spec`, for relatives.
    """
    return spec(
        d,
        **layers,
        attention={"scale": d.attention_multiplier},
        layer={"residual_scale": d.residual_multiplier},
        embedding_scale=d.embedding_multiplier,
        logit_scale=1 / d.logits_scaling,
    )


class SmolLM3(Llama, Windowed):
    use_sliding_window: bool = False
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4


def smollm3(d: SmolLM3) -> DecoderSpec:
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
        ropes=(rope(d, d.rope), no_rope(d.head_size)),
        rope_of_layer=[0 if has_rope else 1 for has_rope in turned],
    )


def olmo2(d: Biased) -> DecoderSpec:
    """Describe OLMo 2: norms after attention and MLP, and over all heads of queries and keys.

    OLMo team, 2025, arXiv:2501.00656.
    """
    return spec(d, attention={"qk_norm": "whole"}, layer={"order": "post"})


class Olmo3(Biased, Windowed): ...


def olmo3(d: Olmo3) -> DecoderSpec:
    """Describe OLMo 3: OLMo 2 with windows in three of four layers, whose rope is not stretched."""
    kinds = d.kinds(4)
    ropes = tuple(rope(d, d.rope_of(kind, theta=d.rope_theta)) for kind in (FULL, SLIDING))
    return spec(
        d,
        windows=d.windows_of(kinds),
        ropes=ropes,
        rope_of_layer=[int(kind == SLIDING) for kind in kinds],
        attention={"qk_norm": "whole"},
        layer={"order": "post"},
    )


class Exaone4(Plain, Windowed):
    sliding_window_pattern: int | str | None = None


def exaone4(d: Exaone4) -> DecoderSpec:
    """Describe EXAONE 4: norms after attention and MLP; layers without windows have no positions.

    LG AI Research, 2025, arXiv:2507.11407. The small models have no windows, and positions in all
    layers.
    """
    interval = d.sliding_window_pattern if isinstance(d.sliding_window_pattern, int) else 4
    kinds = d.kinds(interval if d.sliding_window else 0)
    return spec(
        d,
        windows=d.windows_of(kinds),
        ropes=(rope(d, d.rope), no_rope(d.head_size)),
        rope_of_layer=[int(bool(d.sliding_window) and kind == FULL) for kind in kinds],
        attention={"qk_norm": "head"},
        layer={"order": "post"},
    )


def glm4(d: Biased) -> DecoderSpec:
    """Describe GLM-4-0414: norms before and after, and rope on neighbours in half of each head."""
    return spec(d, attention={"output_bias": False}, layer={"order": "sandwich"})


class SeedOss(Llama):
    attention_out_bias: bool = False


def seed_oss(d: SeedOss) -> DecoderSpec:
    """Describe Seed-OSS: Llama with biases on queries, keys and values."""
    return spec(d, attention={"output_bias": d.attention_out_bias})


class Ernie(Plain):
    use_bias: bool = False


def ernie4_5(d: Ernie) -> DecoderSpec:
    """Describe Ernie 4.5: Llama with rope on neighbours; the dense models."""
    return spec(d, attention=_biases(d.use_bias), mlp={"has_bias": d.use_bias})


def hunyuan(d: Biased) -> DecoderSpec:
    """Describe Hunyuan: Llama with queries and keys normalized after rope; the dense models."""
    return spec(d, attention={"qk_norm": "head", "norm_after_rope": True})


class Gemma2(Biased, Windowed):
    hidden_activation: str | None = None
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | str | None = None


def gemma2(d: Gemma2) -> DecoderSpec:
    """Describe Gemma 2: norms before and after, GELU, soft caps, and windows in every other layer.

    Gemma team, 2024, arXiv:2408.00118.
    """
    return _gemma(d, kinds=d.kinds(2), ropes=(rope(d, d.rope),))


class Gemma3(Gemma2):
    sliding_window_pattern: int | str | None = None
    rope_local_base_freq: float = 10000.0


def gemma3(d: Gemma3) -> DecoderSpec:
    """Describe Gemma 3: Gemma 2 with normalized queries and keys, and rope by kind of layer.

    Gemma team, 2025, arXiv:2503.19786.
    """
    interval = d.sliding_window_pattern if isinstance(d.sliding_window_pattern, int) else 6
    full = d.rope_of(FULL, theta=d.rope_theta)
    sliding = d.rope_of(SLIDING, theta=d.rope_local_base_freq)
    return _gemma(
        d, kinds=d.kinds(interval), ropes=(rope(d, full), rope(d, sliding)), qk_norm="head"
    )


class Cohere2(Rotary, Windowed):
    hidden_act: str = "silu"
    layer_norm_eps: float = 1e-5
    attention_bias: bool = False
    sliding_window_pattern: int | str | None = None
    logit_scale: float = 0.0625


def cohere2(d: Cohere2) -> DecoderSpec:
    """Describe Command R7B and Command A: parallel layers; those without windows lack positions.

    Cohere, 2025, arXiv:2504.00698.
    """
    interval = d.sliding_window_pattern if isinstance(d.sliding_window_pattern, int) else 4
    kinds = d.kinds(interval)
    has_rope = [kind == SLIDING and d.sliding_window is not None for kind in kinds]
    return spec(
        d,
        windows=d.windows_of(kinds),
        ropes=(rope(d, d.rope), no_rope(d.head_size)),
        rope_of_layer=[0 if turns else 1 for turns in has_rope],
        layer={"order": "parallel"},
        norm="layer",
        logit_scale=d.logit_scale,
    )


class Starcoder2(Rotary):
    hidden_act: str = "silu"
    norm_epsilon: float = 1e-5
    use_bias: bool = False
    sliding_window: int | None = None


def starcoder2(d: Starcoder2) -> DecoderSpec:
    """Describe StarCoder 2: layer norms with biases, and an MLP without gates.

    Lozhkov et al., 2024, arXiv:2402.19173.
    """
    return spec(
        d,
        windows=(d.sliding_window,) * d.num_hidden_layers,
        attention=_biases(d.use_bias),
        mlp={"has_bias": d.use_bias, "is_gated": False},
        norm="layer",
        norm_bias=True,
    )


class GPTNeoX(Rotary):
    hidden_act: str = "silu"
    layer_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_parallel_residual: bool = True
    rotary_emb_base: float = 10000.0
    rotary_pct: float = 0.25


def gpt_neox(d: GPTNeoX) -> DecoderSpec:
    """Describe GPT-NeoX and Pythia: parallel layers with two norms, and rope on a part of a head.

    Black et al., 2022, arXiv:2204.06745; Biderman et al., 2023, arXiv:2304.01373.
    """
    return spec(
        d,
        ropes=(rope(d, _neox_rope(d)),),
        attention={"num_kv_heads": d.num_attention_heads},
        mlp={"has_bias": True, "is_gated": False},
        layer={"order": "parallel_two" if d.use_parallel_residual else "pre"},
        norm="layer",
        norm_bias=True,
    )


def apertus(d: Biased) -> DecoderSpec:
    """Describe Apertus: Llama with normalized queries and keys, and xIELU without gates.

    Swiss AI, 2025, arXiv:2509.14233.
    """
    return spec(d, attention={"qk_norm": "head"}, mlp={"is_gated": False})


def arcee(d: Llama) -> DecoderSpec:
    """Describe AFM: Llama with a squared ReLU without gates."""
    return spec(d, mlp={"is_gated": False})


def _gemma(
    d: Gemma2,
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
            "scale": d.query_pre_attn_scalar**-0.5,
            "softcap": d.attn_logit_softcapping,
            **attention,
        },
        layer={"order": "sandwich"},
        embedding_scale=d.hidden_size**0.5,
        logit_softcap=d.final_logit_softcapping,
    )


def _biases(has_bias: bool) -> dict[str, bool]:
    return {"qkv_bias": has_bias, "output_bias": has_bias}


def _late_windows(d: Qwen2) -> tuple[int | None, ...]:
    window = d.sliding_window if d.use_sliding_window else None
    return d.windows(window, num_full=d.max_window_layers)


def _neox_rope(d: GPTNeoX) -> dict[str, Any]:
    older = {"rope_theta": d.rotary_emb_base, "partial_rotary_factor": d.rotary_pct}
    return {**d.rope, **older, **d.own_rope}
