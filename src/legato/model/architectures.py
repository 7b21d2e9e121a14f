"""Which architectures Legato runs, and what makes each of them another than Llama."""

from collections.abc import Callable
from typing import Any

from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from legato.core.errors import UnsupportedModelError
from legato.model.rope import rope_frequencies
from legato.model.spec import DecoderSpec
from legato.model.validation import check_fields


def llama(config: LlamaConfig) -> DecoderSpec:
    """Llama is the plain decoder, with biases where its configuration asks for them.

    Touvron et al., 2023, arXiv:2302.13971; Llama 3, 2024, arXiv:2407.21783.
    """
    return _spec(
        config,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


def mistral(config: MistralConfig) -> DecoderSpec:
    """Mistral is Llama without biases and, in its first version, with a window in every layer.

    Jiang et al., 2023, arXiv:2310.06825.
    """
    return _spec(config, windows=(config.sliding_window,) * config.num_hidden_layers)


def qwen2(config: Qwen2Config) -> DecoderSpec:
    """Qwen2 is Llama with biases on queries, keys and values, and windows in some layers.

    Qwen2 and Qwen2.5: Yang et al., 2024, arXiv:2407.10671.
    """
    return _spec(config, windows=_windows(config), qkv_bias=True)


def qwen3(config: Qwen3Config) -> DecoderSpec:
    """Qwen3 is Llama with queries and keys normalized a head, and windows in some layers.

    Yang et al., 2025, arXiv:2505.09388; the dense ones.
    """
    return _spec(
        config,
        windows=_windows(config),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
    )


# Key the name in `config.architectures`, value what reads that architecture's configuration.
ARCHITECTURES: dict[str, Callable[[PreTrainedConfig], DecoderSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def check_supported(config: dict[str, Any]) -> None:
    """Refuse what Legato cannot run.

    Args:
        config: the contents of config.json. It is checked before transformers reads it, so that the
            refusal names the architecture even where transformers does not know it.

    Raises:
        UnsupportedModelError: an unknown architecture or a quantized checkpoint.
    """
    names = config.get("architectures") or ["(none named)"]
    if names[0] not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"unsupported architecture {names[0]}; Legato supports {', '.join(ARCHITECTURES)}"
        )
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"the checkpoint is quantized (method {method!r}), which is not supported; use the "
            "unquantized checkpoint or a GGUF file"
        )


def spec_of(config: PreTrainedConfig) -> DecoderSpec:
    """The shape of a supported model.

    Raises:
        UnsupportedModelError: a setting of its configuration that Legato does not know, or that no
            model has.
    """
    spec = ARCHITECTURES[config.architectures[0]](config)
    check_fields(spec)
    return spec


def _spec(
    config: PreTrainedConfig,
    *,
    windows: tuple[int | None, ...] | None = None,
    **switches: bool,
) -> DecoderSpec:
    """Fill in what all supported configurations name alike; the keywords say what differs.

    Args:
        windows: None where no layer has one.
        switches: fields of the spec that are off unless named.

    Raises:
        UnsupportedModelError: an activation or rope type that Legato does not know.
    """
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"unsupported activation {config.hidden_act!r}; Legato supports 'silu'"
        )
    num_layers = config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=num_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_model_len=config.max_position_embeddings,
        rope=rope_frequencies(config, head_dim),
        sliding_windows=windows or (None,) * num_layers,
        tie_word_embeddings=config.tie_word_embeddings,
        **switches,
    )


def _windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer, where `config.layer_types` names the layers that have one.

    Raises:
        UnsupportedModelError: a layer of a type other than full or sliding attention.
    """
    windows: list[int | None] = []
    for layer_type in config.layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"unsupported layer type {layer_type!r}")
        windows.append(config.sliding_window if layer_type == "sliding_attention" else None)
    return tuple(windows)
