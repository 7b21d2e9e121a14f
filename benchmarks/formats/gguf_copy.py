"""Copies a GGUF file with its matrices in other types."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import Keys
from gguf.quants import dequantize

from benchmarks.formats.gguf_writers import LARGE, LARGE_BLOCK, quantize

TypeOf = Callable[[str, tuple[int, ...]], str]
"""From a matrix's name in the file and its shape to its new type."""

_FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1"}
"""As llama.cpp has them for rows that are no whole blocks of 256; Q8_0 for Q6_K."""
_HEADER = "GGUF."


def copy_gguf(
    source: Path, target: Path, type_of: TypeOf, num_layers: int | None = None
) -> dict[str, np.ndarray]:
    """Write `source` with matrices of other types; return what they are dequantized to.

    Args:
        num_layers: only the first so many.

    Returns:
        Key a tensor's name in the file, value float32 in the shape of transformers' checkpoints.
    """
    reader = GGUFReader(source)
    architecture = reader.fields[Keys.General.ARCHITECTURE].contents()
    writer = GGUFWriter(target, architecture)
    layers_key = Keys.LLM.BLOCK_COUNT.format(arch=architecture)
    for field in reader.fields.values():
        if not field.name.startswith(_HEADER) and field.name != Keys.General.ARCHITECTURE:
            kind = field.types[0]
            item = field.types[-1] if kind == GGUFValueType.ARRAY else None
            is_cut = num_layers is not None and field.name == layers_key
            value = num_layers if is_cut else field.contents()
            writer.add_key_value(field.name, value, kind, sub_type=item)
    values: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        if num_layers is not None and (layer_of(tensor.name) or 0) >= num_layers:
            continue
        shape = tuple(int(size) for size in reversed(tensor.shape))
        own = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        if len(shape) == 2:
            kind = fitting(type_of(tensor.name, shape), shape[1])
            raw = quantize(own, kind)
            own = np.asarray(dequantize(raw, GGMLQuantizationType[kind]), np.float32)
            writer.add_tensor(tensor.name, raw, raw_dtype=GGMLQuantizationType[kind])
        else:
            writer.add_tensor(tensor.name, own)
        values[tensor.name] = own.reshape(shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def fitting(kind: str, depth: int) -> str:
    """Return the type, or its fallback for rows of such a length."""
    if kind not in LARGE or depth % LARGE_BLOCK == 0:
        return kind
    return _FALLBACKS.get(kind, "Q8_0")


def everything(kind: str) -> TypeOf:
    """All matrices of one type."""
    return lambda _name, _shape: kind


def layer_of(name: str) -> int | None:
    """Return the layer of a tensor by its name in the file; None if it is in no layer."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" else None


def medium_mix(name: str, _: tuple[int, ...]) -> str:
    """Q4_K_M, as llama.cpp mixes it: Q6_K for the vocabulary and half of V and down projections."""
    layer = layer_of(name)
    if layer is None:
        return "Q6_K"
    return "Q6_K" if layer % 2 == 0 and ("attn_v" in name or "ffn_down" in name) else "Q4_K"
