"""Qwen2 and Qwen2.5 (Yang et al., 2024, arXiv:2407.10671)."""

from transformers import Qwen2Config

from legato.model.spec import DecoderSpec, spec_from_config, windows_from_layer_types


def qwen2(config: Qwen2Config) -> DecoderSpec:
    """Qwen2 is Llama with biases on queries, keys and values, and windows in some layers."""
    return spec_from_config(config, sliding_windows=windows_from_layer_types(config), qkv_bias=True)
