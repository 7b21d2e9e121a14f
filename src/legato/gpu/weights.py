"""Loads a checkpoint's weights as a GPU computes with them: plain, quantized, or 8-bit floats."""

import logging
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

from legato.core.errors import ConfigError
from legato.gpu.linear import Fp8Linear, QuantizedLinear
from legato.model.base import NamedWeights
from legato.model.decoder import Decoder
from legato.model.layers import FusedLinear, Linear
from legato.model.quantization import QuantizedWeight, copy_plain, plain
from legato.model.quantized_forms import concatenate, in_blocks

logger = logging.getLogger(__name__)

_LEAST_FP8_CAPABILITY = (8, 9)
_FP8_MULTIPLE = 16
"""Divisor of both sizes of a matrix of 8-bit floats."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head"

_Weight = torch.Tensor | QuantizedWeight


def check_fp8(dtype: torch.dtype, device: torch.device) -> None:
    """Raise `ConfigError` if products of 8-bit floats do not run here."""
    if dtype != torch.bfloat16:
        raise ConfigError("quantization fp8 computes in bfloat16, which --dtype bfloat16 asks for")
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_FP8_CAPABILITY:
        raise ConfigError(
            "quantization fp8 needs a GPU of compute capability 8.9 or later, and this one has "
            f"{capability[0]}.{capability[1]}; int8 runs on it"
        )


def load_weights(
    decoder: Decoder, weights: NamedWeights, *, device: torch.device, is_fp8: bool
) -> int:
    """Load a decoder's weights, and put its projections on the device one at a time.

    A projection becomes a `QuantizedLinear` if all its parts are quantized for computation, and
    stays plain if only some are.

    Args:
        decoder: its projections are on the meta device.
        is_fp8: turn plain projections of the layers into 8-bit floats.

    Returns:
        Bytes that a step reads.
    """
    of_part = {name: p for p in _projections(decoder) for name in p.names}
    slots = decoder.checkpoint_slots()
    found: defaultdict[str, dict[str, _Weight]] = defaultdict(dict)
    for name, weight in weights:
        if name not in of_part:
            copy_plain(weight, slots[name])
            if name == _EMBEDDING and decoder.lm_head is None:
                blocks = _blocks(weight)
                if blocks is not None:
                    decoder.lm_head = QuantizedLinear(blocks, None, device)
            continue
        projection = of_part[name]
        own = found[projection.path]
        own[name] = weight
        if len(own) == len(projection.names):
            parts = found.pop(projection.path)
            module = _module(projection, parts, decoder.dtype, device, is_fp8)
            decoder.set_submodule(projection.path, module)
    return _num_bytes(decoder)


class _Projection(NamedTuple):
    """Attributes: path: in the decoder; parts: names in checkpoints of the fused projections."""

    path: str
    linear: Linear
    parts: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """Names of all its tensors in checkpoints."""
        kinds = ("weight",) if self.linear.bias is None else ("weight", "bias")
        return [f"{part}.{kind}" for part in self.parts for kind in kinds]


def _projections(decoder: Decoder) -> Iterator[_Projection]:
    for path, module in decoder.named_modules():
        if isinstance(module, FusedLinear):
            parent = path.rpartition(".")[0]
            yield _Projection(
                path, module, tuple(f"model.{parent}.{part}" for part in module.parts)
            )
        elif isinstance(module, Linear):
            yield _Projection(path, module, (path if path == _HEAD else f"model.{path}",))


def _module(
    projection: _Projection,
    found: dict[str, _Weight],
    dtype: torch.dtype,
    device: torch.device,
    is_fp8: bool,
) -> nn.Module:
    linear = projection.linear
    matrices = [found[f"{part}.weight"] for part in projection.parts]
    bias = None
    if linear.bias is not None:
        biases = [plain(found[f"{part}.bias"]) for part in projection.parts]
        bias = torch.cat(biases).to(device, dtype)
    blocks = [codes for matrix in matrices if (codes := _blocks(matrix)) is not None]
    if len(blocks) == len(matrices):
        return QuantizedLinear(concatenate(blocks), bias, device)
    has_fp8_sizes = not any(size % _FP8_MULTIPLE for size in linear.weight.shape)
    if is_fp8 and has_fp8_sizes and projection.path != _HEAD:
        weight = torch.cat([plain(matrix).to(device, dtype) for matrix in matrices])
        return Fp8Linear(weight, bias)
    linear.to_empty(device=device)
    rows = torch.split(linear.weight, [matrix.shape[0] for matrix in matrices])
    for matrix, own in zip(matrices, rows, strict=True):
        copy_plain(matrix, own)
    if linear.bias is not None and bias is not None:
        linear.bias.copy_(bias)
    return linear


def _blocks(weight: _Weight) -> QuantizedWeight | None:
    """Return the weight as a `QuantizedLinear` keeps it; None if it becomes plain."""
    if not isinstance(weight, QuantizedWeight) or weight.is_stored_only:
        return None
    blocks = in_blocks(weight)
    if blocks is None:
        _log_widening()
    return blocks


@cache
def _log_widening() -> None:
    logger.warning(
        "a GPU keeps only codes in groups of a multiple of 32 quantized: weights of tables, 8-bit "
        "floats, groups of 16 and reordered inputs are widened"
    )


def _num_bytes(decoder: Decoder) -> int:
    tensors = chain(decoder.named_parameters(), decoder.named_buffers())
    return sum(
        tensor.nbytes
        for name, tensor in tensors
        if decoder.lm_head is None or not name.startswith("embed_tokens.")
    )
