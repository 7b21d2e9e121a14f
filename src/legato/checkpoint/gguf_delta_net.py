"""The order of gated delta nets' heads in GGUF files."""

import torch

from legato.core.errors import UnsupportedModelError
from legato.model.mixer_spec import DeltaNetSpec
from legato.model.quantization import QuantizedWeight, plain
from legato.model.transforms import Named, Transform, Weight


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
        if isinstance(weight, QuantizedWeight) and (
            change is not columns or net.value_dim % weight.group == 0
        ):
            return [(name, weight.map(change))]
        return [(name, change(plain(weight)))]

    return apply
