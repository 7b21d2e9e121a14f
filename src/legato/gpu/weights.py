"""Loads a checkpoint's weights as a GPU computes with them: plain, quantized, or 8-bit floats."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

from legato.core.errors import ConfigError
from legato.gpu.experts import GpuExperts, codes_of
from legato.gpu.kernels.experts import ExpertWeights
from legato.gpu.linear import Fp8Linear, QuantizedLinear, rounded
from legato.model.decoder import Decoder
from legato.model.experts import EXPERT_PARTS, Experts
from legato.model.linear import FusedLinear, Linear
from legato.model.model import NamedWeights
from legato.model.quantization import QuantizedWeight, copy_plain, plain
from legato.model.quantized_forms import can_concatenate, concatenate, in_blocks

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

    A projection becomes a `QuantizedLinear` if all its parts are quantized for computation, an
    `Fp8Linear` if they are 8-bit floats with a scale for each row, and stays plain if only some are
    quantized. So does each projection of a layer's experts, all together.

    Args:
        decoder: its projections and experts are on the meta device.
        is_fp8: turn plain projections of the layers into 8-bit floats.

    Returns:
        Bytes that a step reads.
    """
    of_part = {name: module for module in _replaced(decoder) for name in module.names}
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
        meta = of_part[name]
        own = found[meta.path]
        own[name] = weight
        if len(own) == len(meta.names):
            parts = found.pop(meta.path)
            if isinstance(meta, _ExpertSet):
                module: nn.Module = _experts(meta, parts, decoder.dtype, device)
            else:
                module = _module(meta, parts, decoder.dtype, device, is_fp8)
            decoder.set_submodule(meta.path, module)
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


class _ExpertSet(NamedTuple):
    """Attributes: path: in the decoder; names: all tensors in checkpoints."""

    path: str
    experts: Experts
    names: list[str]


def _replaced(decoder: Decoder) -> Iterator[_Projection | _ExpertSet]:
    """Yield the modules on the meta device that loading replaces."""
    for path, module in decoder.named_modules():
        if isinstance(module, FusedLinear):
            parent = path.rpartition(".")[0]
            yield _Projection(
                path, module, tuple(f"model.{parent}.{part}" for part in module.parts)
            )
        elif isinstance(module, Linear):
            yield _Projection(path, module, (path if path == _HEAD else f"model.{path}",))
        elif isinstance(module, Experts):
            names = [name for name, _ in module.checkpoint_slots(f"model.{path}")]
            yield _ExpertSet(path, module, names)


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
    has_fp8_sizes = not any(size % _FP8_MULTIPLE for size in linear.weight.shape)
    can_be_fp8 = has_fp8_sizes and projection.path != _HEAD
    floats = _floats_of_rows(matrices, dtype, device) if can_be_fp8 else None
    if floats is not None:
        return Fp8Linear(*floats, bias)
    blocks = [codes for matrix in matrices if (codes := _blocks(matrix)) is not None]
    if len(blocks) == len(matrices) and can_concatenate(blocks):
        return QuantizedLinear(concatenate(blocks), bias, device)
    if is_fp8 and can_be_fp8:
        weight = torch.cat([plain(matrix).to(device, dtype) for matrix in matrices])
        return Fp8Linear(*rounded(weight), bias)
    linear.to_empty(device=device)
    rows = torch.split(linear.weight, [matrix.shape[0] for matrix in matrices])
    for matrix, own in zip(matrices, rows, strict=True):
        copy_plain(matrix, own)
    if linear.bias is not None and bias is not None:
        linear.bias.copy_(bias)
    return linear


def _floats_of_rows(
    matrices: Sequence[_Weight], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return 8-bit floats [N, K] and the scales [N, 1] of a checkpoint that has such.

    None if not all matrices are 8-bit floats with a scale for each row, or if products of them do
    not run here.
    """
    floats: list[QuantizedWeight] = []
    for matrix in matrices:
        if not isinstance(matrix, QuantizedWeight) or matrix.is_stored_only:
            return None
        if not matrix.is_float8 or not (matrix.scales == matrix.scales[:, :1]).all():
            return None
        floats.append(matrix)
    try:
        check_fp8(dtype, device)
    except ConfigError:
        return None
    codes = torch.cat([matrix.codes for matrix in floats]).to(device)
    scales = [matrix.scales[:, :1].float() * 2.0**matrix.exponent for matrix in floats]
    return codes.view(torch.float8_e4m3fn), torch.cat(scales).to(device)


def _experts(
    own: _ExpertSet, found: dict[str, _Weight], dtype: torch.dtype, device: torch.device
) -> GpuExperts:
    num_experts = len(own.experts.down_proj)

    def weights_of(parts: tuple[str, ...]) -> ExpertWeights:
        paths = [f"model.{own.path}.{i}.{part}" for i in range(num_experts) for part in parts]
        matrices = [found[f"{path}.weight"] for path in paths]
        weights = _expert_weights(matrices, num_experts, dtype, device)
        if own.experts.down_bias is None:
            return weights
        biases = torch.cat([plain(found[f"{path}.bias"]) for path in paths])
        return weights._replace(bias=biases.view(num_experts, -1).to(device, dtype))

    gate_up, down = map(weights_of, (own.experts.parts, EXPERT_PARTS["down"]))
    return GpuExperts(own.experts, gate_up, down)


def _expert_weights(
    matrices: list[_Weight], num_experts: int, dtype: torch.dtype, device: torch.device
) -> ExpertWeights:
    """Return the weights of experts from the parts of the first, of the second, and so on."""
    blocks = [codes for matrix in matrices if (codes := _blocks(matrix)) is not None]
    if len(blocks) == len(matrices) and can_concatenate(blocks):
        return codes_of(concatenate(blocks), num_experts, device)
    sizes = [matrix.shape[0] for matrix in matrices]
    rows = torch.empty(sum(sizes), matrices[0].shape[1], dtype=dtype, device=device)
    for matrix, own in zip(matrices, torch.split(rows, sizes), strict=True):
        copy_plain(matrix, own)
    return ExpertWeights(rows.view(num_experts, -1, rows.shape[1]))


def _blocks(weight: _Weight) -> QuantizedWeight | None:
    """Return the weight as a GPU keeps it in codes; None if it becomes plain."""
    if not isinstance(weight, QuantizedWeight) or weight.is_stored_only:
        return None
    blocks = in_blocks(weight)
    if blocks is None:
        _log_widening()
    return blocks


@cache
def _log_widening() -> None:
    logger.warning(
        "a GPU keeps only codes in groups of a multiple of 32 quantized: weights of tables such as "
        "NF4's, groups of 16 and reordered inputs are widened"
    )


def _num_bytes(decoder: Decoder) -> int:
    tensors = chain(decoder.named_parameters(), decoder.named_buffers())
    return sum(
        tensor.nbytes
        for name, tensor in tensors
        if decoder.lm_head is None or not name.startswith("embed_tokens.")
    )
