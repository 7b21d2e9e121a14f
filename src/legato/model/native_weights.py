"""Weights of native layers: parts of checkpoints joined, as the extension takes them."""

from collections.abc import Sequence
from itertools import count, takewhile

import torch

from legato.model.experts import EXPERT_PARTS
from legato.model.file_weight import FileWeight, stacked
from legato.model.mlp_spec import MlpSpec, MoeSpec
from legato.model.native_experts import num_expert_weights, take_router
from legato.model.quantization import QuantizedWeight, copy_plain, plain
from legato.model.quantized_forms import native_form
from legato.model.spec import DecoderSpec

DTYPE = torch.bfloat16
PANEL = 32
"""Outputs that are computed together."""
_PLAIN_BITS = 16
"""Given as bits of a code if the extension is to dequantize the weight."""

Weight = torch.Tensor | QuantizedWeight
_MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "input_gate": ("layer_input.gate",),
    "input_output": ("layer_input.projection",),
}
"""Key the extension's name of a matrix, value the names of its parts in checkpoints."""
_STACKED = ("qkv",)
"""Matrices that the extension takes in parts with blocks of several types."""
_SHARED_MATRICES = {
    **_MATRICES,
    "gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "down": ("mlp.shared_expert.down_proj",),
}
"""The same of a layer with experts, whose MLP is an expert for all rows, or missing."""
_NORMS = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "attention_output_norm": "attention_output_layernorm",
    "mlp_output_norm": "mlp_output_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "input_output_norm": "layer_input.norm",
}
"""Key the extension's name of a norm, value its name in checkpoints."""
_IN_FLOAT32 = (
    "norm.weight",
    ".self_attn.sinks",
    ".layer_scalar",
    ".mlp.gate.weight",
    ".mlp.gate.bias",
    ".mlp.gate.selection_bias",
    ".mlp.shared_expert_gate.weight",
)
"""Ends of the names of weights that stay in float32 until the extension has them."""


def as_computed(name: str, weight: Weight) -> Weight:
    if isinstance(weight, QuantizedWeight):
        return weight
    return weight.to(torch.float32 if name.endswith(_IN_FLOAT32) else DTYPE).contiguous()


def weight_bytes(weight: Weight) -> int:
    return weight.num_bytes(DTYPE) if isinstance(weight, QuantizedWeight) else weight.nbytes


def num_parts(spec: DecoderSpec, index: int) -> int:
    """Return the number of weights that a layer has in checkpoints."""
    layer = spec.layers[index]
    attention, mlp = layer.attention, layer.mlp
    assert attention is not None
    assert mlp is not None
    num_qkv = 1 + bool(attention.key_size) + bool(attention.value_size)
    num_attention = num_qkv * (1 + attention.qkv_bias) + 1 + attention.output_bias
    num_norms = 2 * (layer.has_norms_before + layer.has_norms_after)
    if attention.qk_norm is not None:
        num_norms += 1 + bool(attention.key_size)
    if isinstance(mlp, MoeSpec):
        num_mlp = num_expert_weights(mlp) + (0 if mlp.shared is None else 3)
    else:
        num_mlp = 3 * (1 + mlp.has_bias)
    num_inputs = 0 if spec.layer_inputs is None else 3
    num_others = attention.has_sinks + layer.has_output_scale
    return num_attention + num_norms + num_mlp + num_inputs + num_others


def take_parts(own: dict[str, Weight]) -> dict[str, Weight]:
    """Take a layer's weights out of `own`, and return them by the extension's names.

    So at most one layer for each thread is in memory twice.
    """
    layer: dict[str, Weight] = {}
    has_experts = "mlp.gate.weight" in own
    for name, parts in (_SHARED_MATRICES if has_experts else _MATRICES).items():
        layer |= _take_matrix(own, name, parts)
    if has_experts:
        layer |= take_experts(own)
    for name, part in {"sinks": "self_attn.sinks", "output_scale": "layer_scalar"}.items():
        if part in own:
            layer[name] = plain(own.pop(part)).float()
    for name, norm in _NORMS.items():
        if f"{norm}.weight" in own:
            layer[name] = own.pop(f"{norm}.weight")
    assert not own, f"native layers do not know {', '.join(own)}"
    return layer


def take_experts(own: dict[str, Weight]) -> dict[str, Weight]:
    """Take a layer's router and its experts out of `own`, as `take_parts` does."""
    found = take_router(own)
    for expert in takewhile(lambda i: f"mlp.experts.{i}.down_proj.weight" in own, count()):
        for name, parts in EXPERT_PARTS.items():
            names = [f"mlp.experts.{expert}.{part}" for part in parts]
            found |= _take_matrix(own, f"expert{expert}.{name}", names)
    return found


def _take_matrix(own: dict[str, Weight], name: str, parts: Sequence[str]) -> dict[str, Weight]:
    """Take the parts of a matrix, and of its bias, that the layer has out of `own`."""
    found: dict[str, Weight] = {}
    for kind, whole in {"weight": name, "bias": f"{name}_bias"}.items():
        known = [own.pop(full) for part in parts if (full := f"{part}.{kind}") in own]
        if name in _STACKED and all(part.shape[0] % PANEL == 0 for part in known):
            stack = stacked(known)
            if len(stack) > 1:
                found |= {f"{whole}{index}": part for index, part in enumerate(stack)}
                continue
        if known:
            found[whole] = join(known)
    return found


def join(parts: Sequence[Weight]) -> Weight:
    """Concatenate rows; the result is quantized only if all parts are, in forms that fit."""
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if not quantized:
        return parts[0] if len(parts) == 1 else torch.cat([plain(part) for part in parts])
    if len(stack := stacked(parts)) == 1:
        return stack[0]
    if len(quantized) == len(parts):
        whole = native_form([part.split() for part in quantized])
        if whole is not None:
            return whole
    sizes = [part.shape[0] for part in parts]
    joined = torch.empty(sum(sizes), *parts[0].shape[1:], dtype=DTYPE)
    for part, rows in zip(parts, torch.split(joined, sizes), strict=True):
        copy_plain(part, rows)
    return joined


def addresses_of(weights: dict[str, Weight], mlp: MlpSpec | MoeSpec) -> dict[str, int]:
    """Return the addresses of a layer's weights, and numbers of experts, by the extension's names.

    Args:
        weights: by the extension's names.
        mlp: of the layer.
    """
    found: dict[str, int] = {}
    for name, weight in weights.items():
        found |= weight_addresses(name, weight)
    if isinstance(mlp, MoeSpec):
        found |= {"num_experts": mlp.num_experts, "router.num_rows": weights["router"].shape[0]}
    return found


def weight_addresses(name: str, weight: Weight) -> dict[str, int]:
    """Return the addresses of a weight's parts, by the extension's names."""
    if isinstance(weight, torch.Tensor):
        return {name: weight.data_ptr()}
    parts: dict[str, torch.Tensor | None]
    if isinstance(weight, FileWeight):
        parts = {"blocks": weight.blocks, "table": weight.table}
    else:
        parts = {
            "codes": weight.codes,
            "scales": weight.scales,
            "minima": weight.minima,
            "order": weight.order,
            "table": None if weight.is_float8 else weight.table,
        }
    found = {
        f"{name}.{part}": values.data_ptr() for part, values in parts.items() if values is not None
    }
    numbers = {
        "bits": _PLAIN_BITS if weight.is_stored_only else weight.bits,
        "group": weight.group,
        "zero": weight.zero,
        "exponent": weight.exponent,
        "is_float": int(weight.is_float8),
        "rounds_rows": int(weight.rounds_rows),
        "is_rotated": int(weight.is_rotated),
        "num_outputs": weight.shape[0],
    }
    if isinstance(weight, FileWeight):
        numbers["type"] = weight.form.number
    return found | {f"{name}.{number}": value for number, value in numbers.items()}
