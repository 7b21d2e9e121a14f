"""Rooflines of well-known models and GPUs, from published figures; none was measured here.

GPUs: NVIDIA's datasheets of the A100 80 GB SXM and the H100 SXM, in dense bfloat16, and half of
NVLink's speed, which is given for both directions. Models: the config.json of each. `Roofline` has
the share of these figures that kernels are assumed to reach: 80 % of the bandwidth, 60 % of the
arithmetic in matrix products, 50 % in attention (FlashAttention-2 reaches up to 73 % on an A100,
arXiv:2307.08691, and 35 % on an H100, where FlashAttention-3 reaches 75 %, arXiv:2407.08608), 70 %
of the links. docs/reference/profiles.md compares them with measurements by others.
"""

import msgspec

from legato_lab.simulation.roofline import Gpu, ModelSizes, Roofline

GPUS = {
    "a100": Gpu(
        memory_bytes=80e9, memory_bytes_per_s=2.039e12, flops_per_s=312e12, link_bytes_per_s=300e9
    ),
    "h100": Gpu(
        memory_bytes=80e9, memory_bytes_per_s=3.35e12, flops_per_s=989e12, link_bytes_per_s=450e9
    ),
}


def _model(
    num_layers: int, d_model: int, d_ff: int, heads: tuple[int, int], vocab_size: int, max_len: int
) -> ModelSizes:
    """Args: heads: of queries, and of keys and values."""
    return ModelSizes(
        num_hidden_layers=num_layers,
        hidden_size=d_model,
        intermediate_size=d_ff,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        vocab_size=vocab_size,
        max_position_embeddings=max_len,
    )


MODELS = {
    "mistral-7b": _model(32, 4096, 14_336, (32, 8), 32_000, 32_768),
    "llama-2-7b": _model(32, 4096, 11_008, (32, 32), 32_000, 4096),
    "llama-3-8b": _model(32, 4096, 14_336, (32, 8), 128_256, 8192),
    "codellama-34b": _model(48, 8192, 22_016, (64, 8), 32_000, 16_384),
    "yi-34b": _model(60, 7168, 20_480, (56, 8), 64_000, 4096),
    "llama-2-70b": _model(80, 8192, 28_672, (64, 8), 32_000, 4096),
    "llama-3-70b": _model(80, 8192, 28_672, (64, 8), 128_256, 8192),
    "llama-3.1-70b": _model(80, 8192, 28_672, (64, 8), 128_256, 131_072),
    # Three layers in four are recurrent.
    "qwen3.5-27b": msgspec.structs.replace(
        _model(64, 5120, 17_408, (24, 4), 248_320, 262_144),
        head_dim=256,
        full_attention_interval=4,
        linear_num_value_heads=48,
    ),
}

_TENSOR_PARALLEL = {"27b": 2, "34b": 2, "70b": 4}
"""Key the end of a model's name; other models are on one GPU."""


def rooflines() -> dict[str, Roofline]:
    """Return a roofline for each model, on as many of each GPU as usual; key the profile's name."""
    found: dict[str, Roofline] = {}
    for model_name, model in MODELS.items():
        num_gpus = _TENSOR_PARALLEL.get(model_name.rsplit("-", 1)[1], 1)
        suffix = f"-tp{num_gpus}" if num_gpus > 1 else ""
        for gpu_name, gpu in GPUS.items():
            found[f"{model_name}-{gpu_name}{suffix}"] = Roofline(
                gpu=gpu, model=model, tensor_parallel_size=num_gpus
            )
    return found
