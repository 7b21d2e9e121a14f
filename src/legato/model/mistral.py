"""Mistral (Jiang et al., 2023, arXiv:2310.06825)."""

from transformers import MistralConfig

from legato.model.spec import DecoderSpec, spec_from_config


def mistral(config: MistralConfig) -> DecoderSpec:
    """Mistral is Llama without biases and, in its first version, with a window in every layer."""
    windows = (config.sliding_window,) * config.num_hidden_layers
    return spec_from_config(config, sliding_windows=windows)
