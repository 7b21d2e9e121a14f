"""The table of architectures: which layers run them, from the tables that loading reads."""

from collections.abc import Callable, Mapping
from typing import Any

from legato.gpu import support as gpu
from legato.model import native
from legato.model.architectures import ARCHITECTURES, described
from legato.model.spec import DecoderSpec
from scripts.api_reference.markdown import table

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
    "granitemoehybrid": {
        **_FACTORS,
        "num_local_experts": 0,
        "layer_types": ["attention"] * _SIZES["num_hidden_layers"],
    },
    "qwen3_next": {"num_experts": 0},
    "lfm2": {"full_attn_idxs": [2, 5]},
}
"""Key a model type whose models differ from its defaults, value the fields that they have."""


def parts() -> Mapping[str, Callable[[], str]]:
    return {"architectures": _architectures}


def _architectures() -> str:
    rows = []
    for name, architecture in ARCHITECTURES.items():
        kind = architecture.model_type
        contents = {**_SIZES, **_USUAL.get(kind, {}), "architectures": [name]}
        _, spec = described(contents)
        rows.append([f"`{name}`", f"`{kind}`", _native(spec), _gpu(spec)])
    return table(["architecture", "model type", "native CPU layers", "GPU layers"], rows)


def _native(spec: DecoderSpec) -> str:
    return native.why_not_computed(spec) or "yes"


def _gpu(spec: DecoderSpec) -> str:
    return gpu.why_not_computed(spec) or "yes"
