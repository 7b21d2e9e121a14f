"""Decoders of random shapes and weights, which need no checkpoint."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from legato.model.communicator import ALONE, Communicator
from legato.model.decoder import Decoder
from legato.model.mixer_spec import AttentionSpec, RecurrenceSpec
from legato.model.mlp_spec import MlpSpec, MoeSpec
from legato.model.native_kernels import NativeKernels
from legato.model.native_model import NativeModel
from legato.model.rope import QueryGrowth, RopeFrequencies, no_rope
from legato.model.sharding import shard
from legato.model.spec import DecoderSpec, LayerInputsSpec, LayerSpec

CPU = torch.device("cpu")
_RANDOM = threading.Lock()
"""PyTorch's random numbers, which ranks that are threads would share."""
VOCAB_SIZE = 100


def decoder_spec(
    *,
    sliding_windows: Sequence[int | None] = (None, None),
    intermediate_size: int = 96,
    mlp_bias: bool = False,
    rope_of_layer: Sequence[int] = (),
    experts: Mapping[str, Any] | None = None,
    **changes: Any,
) -> DecoderSpec:
    """Small layers that differ in windows and ropes alone; `changes` are fields of any record.

    Args:
        experts: fields of `MoeSpec` of the last layer; None for no experts.
    """
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "max_model_len": 8192,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "size": intermediate_size,
        "has_bias": mlp_bias,
        **changes,
    }
    head_dim = fields["head_dim"]
    fields.setdefault("scale", head_dim**-0.5)
    fields.setdefault("ropes", (RopeFrequencies(tuple(0.5**i for i in range(head_dim // 2)), 1.0),))
    fields["layers"] = tuple(
        LayerSpec(
            attention=AttentionSpec(**_own(AttentionSpec, fields), window=window, rope=rope),
            mlp=MlpSpec(**_own(MlpSpec, fields)),
            **_own(LayerSpec, fields),
        )
        for window, rope in zip(
            sliding_windows, rope_of_layer or (0,) * len(sliding_windows), strict=True
        )
    )
    if experts is not None:
        own = {"num_experts": 6, "num_active": 2, "size": 64, **experts}
        last = msgspec.structs.replace(fields["layers"][-1], mlp=MoeSpec(**own))
        fields["layers"] = (*fields["layers"][:-1], last)
    return DecoderSpec(**_own(DecoderSpec, fields))


def with_recurrence(own: RecurrenceSpec, *, hidden_size: int, **fields: Any) -> DecoderSpec:
    """Two layers: attention, then a recurrence."""
    spec = decoder_spec(hidden_size=hidden_size, norm_eps=1e-6, **fields)
    mixer = msgspec.structs.replace(spec.layers[1], attention=None, recurrence=own)
    return msgspec.structs.replace(spec, layers=(spec.layers[0], mixer))


def _own(kind: type[msgspec.Struct], fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in kind.__struct_fields__ if name in fields}


def embedded_spec(**changes: Any) -> DecoderSpec:
    """Layers with embeddings and scales of their own; the last reads the keys of the first."""
    spec = decoder_spec(
        **{
            "layer_inputs": LayerInputsSpec(size=32, vocab_size=VOCAB_SIZE),
            "has_output_scale": True,
            "has_value_norm": True,
            "sliding_windows": (45, None, 45),
            **changes,
        }
    )
    *layers, last = spec.layers
    reading = msgspec.structs.replace(last.attention, kv_from=0)
    layers.append(msgspec.structs.replace(last, attention=reading))
    return msgspec.structs.replace(spec, layers=tuple(layers))


SPECS = {
    "grouped": decoder_spec(),
    "wide heads": decoder_spec(head_dim=128, num_heads=6),
    "every head its own keys": decoder_spec(num_kv_heads=4),
    "one key head": decoder_spec(num_heads=9, num_kv_heads=1, head_dim=64),
    "windows": decoder_spec(sliding_windows=(45, None)),
    "biases": decoder_spec(qkv_bias=True, output_bias=True, mlp_bias=True),
    "normed heads, untied": decoder_spec(qk_norm="head", tie_word_embeddings=False),
    "norms after, of whole rows": decoder_spec(
        order="post", qk_norm="whole", residual_scale=0.5, scale=0.3, logit_scale=0.25
    ),
    "norms around, capped": decoder_spec(
        order="sandwich",
        activation="gelu_tanh",
        softcap=2.0,
        logit_softcap=3.0,
        embedding_scale=4.0,
        sliding_windows=(45, None),
        ropes=(RopeFrequencies((*(0.5**i for i in range(6)), *(0.0,) * 10), 1.3), no_rope(32)),
        rope_of_layer=(0, 1),
    ),
    "heads normed after rope": decoder_spec(
        qk_norm="head",
        norm_after_rope=True,
        ropes=(RopeFrequencies(tuple(0.5**i for i in range(16)), 1.1, QueryGrowth(0.3, 40.0)),),
    ),
    "largest heads": decoder_spec(head_dim=512, num_heads=3, num_kv_heads=1),
    "sinks": decoder_spec(has_sinks=True, sliding_windows=(45, None)),
    "embeddings for each layer": embedded_spec(qkv_bias=True, residual_scale=0.5),
    "values that are keys": embedded_spec(
        order="sandwich",
        activation="gelu_tanh",
        qk_norm="head",
        value_is_key=True,
        tie_word_embeddings=False,
    ),
}


SIGMOIDS_IN_GROUPS = {
    "num_active": 3,
    "score": "sigmoid",
    "has_selection_bias": True,
    "num_groups": 3,
    "num_active_groups": 2,
    "factor": 1.5,
    "shared_size": 96,
}
"""Fields of `MoeSpec` that differ from the defaults here."""
EXPERTS = {
    "experts": decoder_spec(experts={"is_normalized": False}),
    "experts by sigmoids, in groups": decoder_spec(residual_scale=0.5, experts=SIGMOIDS_IN_GROUPS),
    "a shared expert with a gate": decoder_spec(
        experts={"activation": "gelu_tanh", "shared_size": 32, "has_shared_gate": True}
    ),
    "limited gates, biases, sinks": decoder_spec(
        has_sinks=True,
        sliding_windows=(45, None),
        experts={
            "num_active": 4,
            "score": "softmax_of_active",
            "has_router_bias": True,
            "has_bias": True,
            "gate_limit": 0.5,
            "gate_slope": 1.702,
        },
    ),
}


def random_decoder(spec: DecoderSpec, dtype: torch.dtype) -> Decoder:
    """The same weights for every dtype: numbers that bfloat16 can hold."""
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
    model.load_weights(
        (name, shard(name, weight, spec, communicator)) for name, weight in whole.items()
    )
    return model
