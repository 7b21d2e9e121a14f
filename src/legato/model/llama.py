"""Llama (Touvron et al., 2023, arXiv:2302.13971; Llama 3, 2024, arXiv:2407.21783)."""

from transformers import LlamaConfig

from legato.model.spec import DecoderSpec, spec_from_config


def llama(config: LlamaConfig) -> DecoderSpec:
    """Llama is the plain decoder, with biases where its configuration asks for them."""
    return spec_from_config(
        config,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
