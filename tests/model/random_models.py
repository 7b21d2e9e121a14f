"""Decoders of random shapes and weights, which need no checkpoint."""

import threading

import torch

from legato.model.communicator import ALONE, Communicator
from legato.model.decoder import Decoder
from legato.model.native import NativeKernels, NativeModel
from legato.model.rope import RopeFrequencies
from legato.model.sharding import shard
from legato.model.spec import DecoderSpec

CPU = torch.device("cpu")
_RANDOM = threading.Lock()
"""PyTorch's random numbers, which ranks that are threads would share."""
VOCAB_SIZE = 100


def decoder_spec(**changes: object) -> DecoderSpec:
    head_dim = changes.get("head_dim", 32)
    assert isinstance(head_dim, int)
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "max_model_len": 8192,
        "rope": RopeFrequencies(tuple(0.5**i for i in range(head_dim // 2)), 1.0),
        "sliding_windows": (None, None),
        "tie_word_embeddings": True,
        **changes,
    }
    return DecoderSpec(**settings)  # type: ignore[arg-type]


SPECS = {
    "grouped": decoder_spec(),
    "wide heads": decoder_spec(head_dim=128, num_heads=6),
    "every head its own keys": decoder_spec(num_kv_heads=4),
    "one key head": decoder_spec(num_heads=9, num_kv_heads=1, head_dim=64),
    "windows": decoder_spec(sliding_windows=(45, None)),
    "biases": decoder_spec(qkv_bias=True, output_bias=True, mlp_bias=True),
    "normed heads, untied": decoder_spec(qk_norm=True, tie_word_embeddings=False),
}


def random_decoder(spec: DecoderSpec, dtype: torch.dtype) -> Decoder:
    """The same weights for every dtype: those that bfloat16 can hold."""
    torch.manual_seed(0)
    decoder = Decoder(spec, dtype=dtype, device=CPU)
    for name, weight in decoder.named_parameters():
        values = torch.randn(weight.shape) * (0.3 if weight.dim() == 1 else 0.15)
        weight.copy_((values + float("norm" in name)).bfloat16())
    return decoder


def native_model(
    spec: DecoderSpec, kernels: NativeKernels, communicator: Communicator = ALONE
) -> NativeModel:
    """With the weights of `random_decoder`, or a rank's part of them."""
    model = NativeModel(spec, kernels, communicator)
    with _RANDOM:
        whole = random_decoder(spec, torch.bfloat16).checkpoint_slots()
    model.load_weights((name, shard(name, weight, communicator)) for name, weight in whole.items())
    return model
