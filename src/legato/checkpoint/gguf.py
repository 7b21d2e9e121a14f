"""Opens checkpoints in llama.cpp's format: one GGUF file."""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from legato.checkpoint import gguf_architectures
from legato.checkpoint.checkpoint import Checkpoint
from legato.checkpoint.gguf_architectures import NO_WEIGHTS
from legato.checkpoint.gguf_blocks import SPLIT_TYPES, GgufBlocks, split_blocks
from legato.checkpoint.gguf_dense import DENSE
from legato.checkpoint.gguf_file import GGUFFile, GGUFTensor
from legato.checkpoint.gguf_gemma import GEMMA
from legato.checkpoint.gguf_granite import GRANITE
from legato.checkpoint.gguf_keys import key_use
from legato.checkpoint.gguf_mixtures import MIXTURES
from legato.checkpoint.gguf_transforms import projections
from legato.checkpoint.source import gguf_companions
from legato.core.errors import UnsupportedModelError
from legato.core.validation import check_sizes, refusing_what_fails
from legato.model.architectures import described, transforms
from legato.model.file_weight import BlockForm, file_weight
from legato.model.model import NamedWeights
from legato.model.quantization import QuantizedWeight, plain
from legato.model.transforms import Transform, shapes_after, transformed

ARCHITECTURES = {
    **gguf_architectures.ARCHITECTURES,
    **DENSE,
    **MIXTURES,
    **GEMMA,
    **GRANITE,
}
"""Key `general.architecture`."""
_SIZES = (
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "attention.kv_lora_rank",
    "attention.q_lora_rank",
    "rope.dimension_count",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
)
logger = logging.getLogger(__name__)

_MATRIX = 2  # dimensions
_MAPPED_BYTES = 2**26
"""Bytes of tensors after which the file's pages are given back: most are packed by then."""
_SIGNED_ZERO = 128
_HALVES = {
    GGMLQuantizationType.Q4_0: (0,),
    GGMLQuantizationType.Q4_1: (0, 2),
    GGMLQuantizationType.Q5_0: (0,),
    GGMLQuantizationType.Q5_1: (0, 2),
    GGMLQuantizationType.Q8_0: (0,),
    GGMLQuantizationType.IQ4_NL: (0,),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
}
"""Key the types whose blocks native kernels pack, in their order there; value the places of float16
numbers in a block."""
_BITS = {
    GGMLQuantizationType.Q5_0: 5,
    GGMLQuantizationType.Q5_1: 5,
    GGMLQuantizationType.Q5_K: 5,
    GGMLQuantizationType.Q6_K: 6,
}
"""Bits of a packed code, if they are not those of `split_blocks`."""
_FLOAT_TYPES = {"F64", "F32", "F16", "BF16"}
_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PROJECTOR = "clip"
_MEDIA = ("v.", "a.", "mm.")
"""How the tensors of towers and projectors begin, which some tools put into the model's file."""
_FURTHER = re.compile(r"blk\.\d+(?=\..*)")
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)")


def open_gguf_checkpoint(path: Path, served_len: int | None = None) -> Checkpoint:
    """Open a GGUF file. Weights of the types that `split_blocks` knows stay quantized.

    Args:
        path: of the first part, if the model is split.
        served_len: positions that are served; None for all that the model was made for.

    Raises:
        UnsupportedModelError: the file is broken, or Legato cannot run the model.
    """
    file = GGUFFile(path)
    if file.architecture == _PROJECTOR:
        raise UnsupportedModelError(
            f"{path.name} holds a projector of images or sound (mmproj), which Legato does not "
            "read yet, and no language model; name the model's own GGUF file"
        )
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"unsupported GGUF architecture {file.architecture!r}; Legato supports "
            + ", ".join(ARCHITECTURES)
        )
    own = ARCHITECTURES[file.architecture]
    scales = {*NO_WEIGHTS, *_scales_of_float4(file)}
    names = {
        name: _transformers_name(name, own.names)
        for name in file.tensors
        if name not in scales and not name.startswith(_MEDIA)
    }
    check_sizes(path, file.get("block_count"), **{name: _size(file, name) for name in _SIZES})
    with refusing_what_fails(path):
        contents = own.config(file)
        _, spec = described(contents, served_len)
        changes = [
            *own.changes(file, spec),
            *projections(spec, has_paired_rows=own.has_paired_rows),
            *transforms(contents, spec, adds_one=False),
        ]
        shapes = {name: file.tensors[stored].shape for stored, name in names.items()}
        changed = shapes_after(shapes, changes)
    return Checkpoint(
        name=path.name,
        spec=spec,
        dtype=torch.bfloat16,
        shapes=changed,
        tensors=partial(_read_tensors, file, names, changes),
        is_quantized=any(map(_has_codes, file.tensors.values())),
        architecture=contents["architectures"][0],
        quantization=_quantization(file),
        kept_bytes={name: _kept_bytes(file.tensors[stored]) for stored, name in names.items()},
        unused=_unused(file, names, changes) + tuple(gguf_companions(path)),
        keys=key_use(file, own.implied),
    )


def _unused(
    file: GGUFFile, names: Mapping[str, str], changes: Sequence[Transform]
) -> tuple[str, ...]:
    """Return the parts of the file that are left out: layers that predict further tokens, towers.

    Args:
        names: key a tensor's name in the file, value transformers' name.
    """
    dropped = (
        stored
        for stored, name in names.items()
        if not shapes_after({name: file.tensors[stored].shape}, changes)
    )
    layers = {
        f"{match[0]} (predicts further tokens)"
        for name in dropped
        if (match := _FURTHER.match(name))
    }
    media = {
        prefix.rstrip(".") for prefix in _MEDIA if any(n.startswith(prefix) for n in file.tensors)
    }
    return tuple(sorted(layers | media))


def _size(file: GGUFFile, name: str) -> object:
    """Return a size; the largest one of sizes by layer."""
    size = file.metadata.get(f"{file.architecture}.{name}")
    return max(size, default=0) if isinstance(size, list) else size


def _quantization(file: GGUFFile) -> str:
    """Return the types of the quantized matrices, the most common first."""
    types = Counter(t.type.name for t in file.tensors.values() if t.type.name not in _FLOAT_TYPES)
    return ", ".join(name for name, _ in types.most_common())


def _has_codes(tensor: GGUFTensor) -> bool:
    """Whether it is a matrix in blocks that stay quantized."""
    return tensor.type in SPLIT_TYPES and len(tensor.shape) >= _MATRIX


def _kept_bytes(tensor: GGUFTensor) -> int:
    if _has_codes(tensor):
        return tensor.num_bytes
    return math.prod(tensor.shape) * torch.bfloat16.itemsize


def _read_tensors(
    file: GGUFFile,
    names: Mapping[str, str],
    changes: Sequence[Transform],
    _: torch.device,
) -> NamedWeights:
    """Yield the weights.

    Args:
        names: key a tensor's name in the file, value transformers' name.
        changes: of tensors with transformers' names.
    """
    _log_widened(file)
    return transformed(_read_all(file, names), changes)


def _read_all(file: GGUFFile, names: Mapping[str, str]) -> NamedWeights:
    """Yield tensors as they are stored, and give back the file's pages every few of them."""
    num_bytes = 0
    for stored, name in names.items():
        num_bytes += file.tensors[stored].num_bytes
        if num_bytes > _MAPPED_BYTES:
            file.release()
            num_bytes = 0
        yield name, _read(file, stored)
    file.release()


def _read(file: GGUFFile, name: str) -> torch.Tensor | QuantizedWeight:
    weight = _read_quantized(file, name) or torch.from_numpy(file.read(name))
    scale = f"{name.removesuffix('weight')}scale"
    if file.tensors[name].type != GGMLQuantizationType.NVFP4 or scale not in file.tensors:
        return weight
    # A number, or one of each expert's matrix.
    factors, num_matrices = torch.from_numpy(file.read(scale)), math.prod(weight.shape[:-2])
    if factors.numel() not in (1, num_matrices):
        raise UnsupportedModelError(
            f"{file.path}: {scale} has {factors.numel()} numbers for {num_matrices} matrices"
        )
    return plain(weight) * factors.reshape(-1, *[1] * (len(weight.shape) - 1))


def _scales_of_float4(file: GGUFFile) -> Iterator[str]:
    """Yield the names of the tensors that scale whole matrices of NVFP4, and their rows."""
    for name, tensor in file.tensors.items():
        if tensor.type == GGMLQuantizationType.NVFP4:
            yield from (f"{name.removesuffix('weight')}{kind}" for kind in ("scale", "input_scale"))


def _log_widened(file: GGUFFile) -> None:
    """Name the types of matrices that have codes, but not in a form that stays quantized."""
    names = {t.type.name for t in file.tensors.values() if len(t.shape) >= _MATRIX}
    widened = sorted(names - _FLOAT_TYPES - {kind.name for kind in SPLIT_TYPES})
    if widened:
        logger.warning("%s: weights of type %s are widened", file.path, ", ".join(widened))


def _read_quantized(file: GGUFFile, name: str) -> QuantizedWeight | None:
    """Return a quantized matrix, or those of all experts as one; None if it has no codes."""
    shape, kind = file.tensors[name].shape, file.tensors[name].type
    if len(shape) >= _MATRIX and kind in BLOCK_FORMS:
        raw = torch.from_numpy(file.read_bytes(name))
        return file_weight(raw.view(math.prod(shape[:-1]), -1), BLOCK_FORMS[kind])
    blocks = file.read_blocks(name) if len(shape) >= _MATRIX else None
    if blocks is None:
        return None
    return _quantized(blocks, math.prod(shape[:-1]))


def _quantized(blocks: GgufBlocks, num_rows: int) -> QuantizedWeight:
    codes, scales, minima = (
        None if part is None else torch.from_numpy(part).reshape(num_rows, -1)
        for part in blocks[:3]
    )
    assert codes is not None
    assert scales is not None
    table = None if blocks.table is None else torch.from_numpy(blocks.table)
    return QuantizedWeight(codes, scales, minima, blocks.bits, zero=blocks.zero, table=table)


def _split(kind: GGMLQuantizationType, raw: torch.Tensor) -> QuantizedWeight:
    """Split blocks [N, bytes of a row]."""
    blocks = split_blocks(raw.contiguous().numpy().reshape(-1, GGML_QUANT_SIZES[kind][1]), kind)
    assert blocks is not None
    return _quantized(blocks, len(raw))


def _form(number: int, kind: GGMLQuantizationType) -> BlockForm:
    """Return a type of blocks that the extension reads."""
    num_values, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = split_blocks(np.zeros((1, num_bytes), np.uint8), kind)
    assert blocks is not None
    table = None
    if blocks.table is not None:
        table = torch.from_numpy(blocks.table + _SIGNED_ZERO).to(torch.uint8)
    return BlockForm(
        number=number,
        num_values=num_values,
        num_bytes=num_bytes,
        halves=_HALVES[kind],
        bits=_BITS.get(kind, blocks.bits),
        group=num_values // blocks.scales.shape[1],
        zero=blocks.zero if table is None else _SIGNED_ZERO,
        table=table,
        split=partial(_split, kind),
    )


def _transformers_name(name: str, further: Mapping[str, str] = {}) -> str:
    """Return transformers' name of a tensor; an unknown name stays, for the loader to reject.

    Args:
        further: names of a layer's tensors, besides the usual ones.
    """
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        stem, _, suffix = name.rpartition(".")
        return f"{_GLOBAL_NAMES[stem]}.{suffix}" if stem in _GLOBAL_NAMES else name
    layer, own = match.groups()
    stem, _, suffix = own.rpartition(".")
    if own in further:
        return f"model.layers.{layer}.{further[own]}"
    known = {**_LAYER_NAMES, **further}
    return f"model.layers.{layer}.{known[stem]}.{suffix}" if stem in known else name


BLOCK_FORMS = {kind: _form(number, kind) for number, kind in enumerate(_HALVES)}
