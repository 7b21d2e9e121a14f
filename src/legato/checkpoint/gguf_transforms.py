"""Transforms of tensors whose rows llama.cpp fuses, or has in another order than transformers."""

from functools import partial

import torch

from legato.core.errors import UnsupportedModelError
from legato.model.mixer_spec import DeltaNetSpec
from legato.model.quantization import QuantizedWeight, plain
from legato.model.spec import DecoderSpec
from legato.model.transforms import Named, Transform, Weight, split


def projections(spec: DecoderSpec, *, has_paired_rows: bool) -> list[Transform]:
    """Return what splits fused queries, keys and values, and brings their rows into order.

    Args:
        has_paired_rows: `GGUFArchitecture.has_paired_rows`.
    """
    attention = next((layer.attention for layer in spec.layers if layer.attention), None)
    if attention is None:
        return []
    kv_size = attention.kv_size
    parts = {"q_proj": attention.query_size, "k_proj": kv_size, "v_proj": kv_size}
    fused = split("qkv_proj", parts)
    return [fused, _in_halves(attention.head_dim)] if has_paired_rows else [fused]


def _in_halves(head_dim: int) -> Transform:
    """Return what undoes the order of llama.cpp's rows of queries and keys."""

    def apply(name: str, weight: Weight) -> list[Named]:
        if name.split(".")[-2] not in ("q_proj", "k_proj"):
            return [(name, weight)]
        if weight.shape[0] % head_dim:
            raise UnsupportedModelError(f"{name} has {weight.shape[0]} rows of heads of {head_dim}")
        undo = partial(undo_interleaving, num_heads=weight.shape[0] // head_dim)
        return [(name, weight.map(undo) if isinstance(weight, QuantizedWeight) else undo(weight))]

    return apply


def undo_interleaving(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder rows: llama.cpp rotates rows (2i, 2i + 1) of a head, transformers (i, i + D / 2).

    Args:
        tensor: [num_heads * D, ...] weight or bias of queries or keys.
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def with_grouped_heads(net: DeltaNetSpec) -> Transform:
    """Reorder the heads of values: llama.cpp puts those of a key head apart, not together.

    The file has the first value head of each key head, then the second of each, and so on.
    """
    shared = net.num_heads // net.num_key_heads

    def rows(values: torch.Tensor) -> torch.Tensor:
        heads = values.reshape(shared, net.num_key_heads, -1, *values.shape[1:])
        return heads.transpose(0, 1).reshape(values.shape)

    def rows_of_values(values: torch.Tensor) -> torch.Tensor:
        first = 2 * net.key_size
        return torch.cat((values[:first], rows(values[first:])))

    def columns(values: torch.Tensor) -> torch.Tensor:
        heads = values.reshape(len(values), shared, net.num_key_heads, -1)
        return heads.transpose(1, 2).reshape(values.shape)

    by_head, by_value = (rows, 0, net.num_heads), (rows, 0, net.value_size)
    after_keys = rows_of_values, 0, net.num_channels
    # Key a tensor, value its change, and its dimension that must have a size.
    changes = {
        "in_proj_qkv.weight": after_keys,
        "conv.weight": after_keys,
        "in_proj_z.weight": by_value,
        "in_proj_b.weight": by_head,
        "in_proj_a.weight": by_head,
        "A_log": by_head,
        "dt_bias": by_head,
        "out_proj.weight": (columns, 1, net.value_size),
    }

    def apply(name: str, weight: Weight) -> list[Named]:
        part = name.partition(".recurrence.")[2]
        if part not in changes:
            return [(name, weight)]
        change, dimension, size = changes[part]
        if weight.shape[dimension : dimension + 1] != (size,):
            raise UnsupportedModelError(f"{name} has shape {tuple(weight.shape)}")
        if isinstance(weight, QuantizedWeight) and change is columns:
            weight = weight.in_columns(net.value_dim)
        if isinstance(weight, QuantizedWeight) and (
            change is not columns or net.value_dim % weight.group == 0
        ):
            return [(name, weight.map(change))]
        return [(name, change(plain(weight)))]

    return apply
