"""The supported architectures, and how each differs from Llama."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from legato.core.errors import UnsupportedModelError
from legato.core.validation import check_fields
from legato.model.description import Description
from legato.model.rope import rope_frequencies
from legato.model.spec import DecoderSpec


def llama(described: Description) -> DecoderSpec:
    """Describe Llama: the plain decoder, with biases if its configuration has them.

    Touvron et al., 2023, arXiv:2302.13971; Llama 3, 2024, arXiv:2407.21783.
    """
    return _spec(
        described,
        qkv_bias=described.attention_bias,
        output_bias=described.attention_bias,
        mlp_bias=described.mlp_bias,
    )


def mistral(described: Description) -> DecoderSpec:
    """Describe Mistral: Llama without biases, in some versions with windows in some or all layers.

    Jiang et al., 2023, arXiv:2310.06825.
    """
    return _spec(described, windows=described.windows(described.sliding_window, num_full=0))


def qwen2(described: Description) -> DecoderSpec:
    """Describe Qwen2: Llama with biases on queries, keys and values, and windows in some layers.

    Qwen2 and Qwen2.5: Yang et al., 2024, arXiv:2407.10671.
    """
    return _spec(described, windows=_windows(described), qkv_bias=True)


def qwen3(described: Description) -> DecoderSpec:
    """Describe Qwen3: Llama with queries and keys normalized a head, and windows in some layers.

    Yang et al., 2025, arXiv:2505.09388; the dense models.
    """
    return _spec(
        described,
        windows=_windows(described),
        qkv_bias=described.attention_bias,
        output_bias=described.attention_bias,
        qk_norm=True,
    )


def _windows(described: Description) -> tuple[int | None, ...]:
    window = described.sliding_window if described.use_sliding_window else None
    return described.windows(window, num_full=described.max_window_layers)


class _Architecture(NamedTuple):
    """Attributes:
    model_type: the value of `model_type` in its config.json.
    defaults: of fields missing there, if they differ from `Description`'s.
    """

    model_type: str
    spec: Callable[[Description], DecoderSpec]
    defaults: dict[str, Any]


# Key a name in a configuration's `architectures`.
ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture("llama", llama, {"max_position_embeddings": 2048}),
    "MistralForCausalLM": _Architecture(
        "mistral", mistral, {"max_position_embeddings": 2**17, "num_key_value_heads": 8}
    ),
    "Qwen2ForCausalLM": _Architecture(
        "qwen2", qwen2, {"max_position_embeddings": 2**15, "num_key_value_heads": 32}
    ),
    "Qwen3ForCausalLM": _Architecture(
        "qwen3",
        qwen3,
        {"max_position_embeddings": 2**15, "num_key_value_heads": 32, "head_dim": 128},
    ),
}


def check_supported(config: dict[str, Any]) -> None:
    """Reject models that Legato cannot run.

    Args:
        config: the contents of config.json.

    Raises:
        UnsupportedModelError: an unknown architecture.
    """
    names = config.get("architectures") or ["(none named)"]
    if names[0] not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"unsupported architecture {names[0]}; Legato supports {', '.join(ARCHITECTURES)}"
        )
    expected = ARCHITECTURES[names[0]].model_type
    if config.get("model_type") != expected:
        raise UnsupportedModelError(
            f"model_type is {config.get('model_type')!r}, but {names[0]} is {expected!r}"
        )


def described(contents: dict[str, Any]) -> tuple[Description, DecoderSpec]:
    """Return a supported model's description and the spec of its decoder.

    Args:
        contents: of config.json, or the same fields from other metadata.

    Raises:
        UnsupportedModelError: a setting that Legato does not know, or an impossible value.
        msgspec.ValidationError: a field is missing, or of another type.
    """
    architecture = ARCHITECTURES[contents["architectures"][0]]
    description = msgspec.convert(architecture.defaults | contents, Description)
    spec = architecture.spec(description)
    check_fields(spec)
    return description, spec


def _spec(
    description: Description,
    *,
    windows: tuple[int | None, ...] | None = None,
    **switches: bool,
) -> DecoderSpec:
    """Build a spec from the fields that all architectures share; the keywords say what differs.

    Args:
        windows: of each layer; None if no layer has one.
        switches: fields of the spec that are off by default.

    Raises:
        UnsupportedModelError: an activation or rope type that Legato does not know.
    """
    if description.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"unsupported activation {description.hidden_act!r}; Legato supports 'silu'"
        )
    head_dim = description.head_size
    return DecoderSpec(
        vocab_size=description.vocab_size,
        hidden_size=description.hidden_size,
        intermediate_size=description.intermediate_size,
        num_layers=description.num_hidden_layers,
        num_heads=description.num_attention_heads,
        num_kv_heads=description.num_key_value_heads or description.num_attention_heads,
        head_dim=head_dim,
        rms_norm_eps=description.rms_norm_eps,
        max_model_len=description.max_position_embeddings,
        rope=rope_frequencies(description.rope, head_dim, description.max_position_embeddings),
        sliding_windows=windows or (None,) * description.num_hidden_layers,
        tie_word_embeddings=description.tie_word_embeddings,
        **switches,
    )
