"""The supported architectures, and which layers run each, from the tables that loading reads."""

from typing import Any

import msgspec

from legato.gpu import support as gpu
from legato.model import native_support as native
from legato.model.architectures import ARCHITECTURES, described

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""A small model of each architecture; other fields have the defaults, or `_USUAL`."""
_FACTORS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
_USUAL: dict[str, dict[str, Any]] = {
    "granite": _FACTORS,
    "granitemoe": _FACTORS,
    "granitemoehybrid": {
        **_FACTORS,
        "num_local_experts": 0,
        "layer_types": ["attention"] * _SIZES["num_hidden_layers"],
    },
    "lfm2": {"full_attn_idxs": [2, 5]},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "lfm2_moe": {"full_attn_idxs": [2, 5]},
    "falcon_h1": {"mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_d_head": 64},
}
"""Key a model type whose models differ from its defaults, value the fields that they have."""


class ArchitectureRow(msgspec.Struct, frozen=True):
    """An architecture; `native` and `gpu` are why such layers do not run it, empty if they do.

    `native` is "partly" if most parts of PyTorch's layers are native.
    """

    architecture: str
    model_type: str
    native: str
    gpu: str


def architecture_rows() -> list[ArchitectureRow]:
    """Return the supported architectures, from a small model of each."""
    rows = []
    for name, architecture in ARCHITECTURES.items():
        kind = architecture.model_type
        contents = {**_SIZES, **_USUAL.get(kind, {}), "architectures": [name]}
        _, spec = described(contents)
        in_layers = native.why_not_computed(spec) if native.why_not_in_parts(spec) else "partly"
        rows.append(ArchitectureRow(name, kind, in_layers, gpu.why_not_computed(spec)))
    return rows
