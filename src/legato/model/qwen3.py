"""Qwen3 (Yang et al., 2025, arXiv:2505.09388), dense."""

from transformers import Qwen3Config

from legato.model.spec import DecoderSpec, spec_from_config, windows_from_layer_types


def qwen3(config: Qwen3Config) -> DecoderSpec:
    """Qwen3 is Llama with queries and keys normalized a head, and windows in some layers."""
    return spec_from_config(
        config,
        sliding_windows=windows_from_layer_types(config),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
    )
