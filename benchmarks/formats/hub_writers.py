"""Quantizes matrices as published checkpoints hold them: rounded to the nearest, no calibration.

Each writer returns a matrix's tensors and what they stand for by the format's own definition.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from legato.checkpoint.gguf_blocks import FLOAT4_TABLE

GROUP = 64
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FLOAT8 = torch.float8_e4m3fn
# fmt: off
_NF4 = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)
# fmt: on
_FP4_MAGNITUDES = (0.0, 0.00520833, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25)
_FP4 = (*_FP4_MAGNITUDES, *(-value for value in _FP4_MAGNITUDES))

Tensors = dict[str, torch.Tensor]
"""Key the suffix after the module's name."""
Writer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


class HubFormat(NamedTuple):
    """Attributes: `config`: the checkpoint's quantization_config."""

    config: dict[str, Any]
    write: Writer


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, values = _affine(weight, 4)
    packed = (_awq_words(codes.t()), _awq_words(zeros.t()))
    tensors = {"qweight": packed[0], "qzeros": packed[1], "scales": scales.t().contiguous()}
    return tensors, values


def _awq_words(codes: torch.Tensor) -> torch.Tensor:
    return _words(codes.reshape(len(codes), -1, 8)[..., list(_AWQ_ORDER)].flatten(1), 4)


def _gptq(zero_offset: int, *, bits: int = 4, is_reordered: bool = False) -> Writer:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        depth = weight.shape[1]
        generator = torch.Generator().manual_seed(depth)
        order = torch.arange(depth)
        if is_reordered:
            order = torch.randperm(depth, generator=generator)
        codes, scales, zeros, values = _affine(weight[:, order], bits)
        in_place = torch.argsort(order)
        tensors = {
            "qweight": _words(codes[:, in_place], bits).t().contiguous(),
            "qzeros": _words(zeros.t() - zero_offset & 2**bits - 1, bits),
            "scales": scales.t().contiguous(),
            "g_idx": (in_place // GROUP).int(),
        }
        return tensors, values[:, in_place]

    return write


def _packed_integers(weight: torch.Tensor, *, bits: int = 4) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, values = _affine(weight, bits)
    return {
        "weight_packed": _words(codes, bits),
        "weight_scale": scales,
        "weight_zero_point": _words(zeros.t(), bits).t().contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }, values


def _symmetric_integers(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = weight.reshape(len(weight), -1, GROUP)
    scales = (groups.abs().amax(dim=-1) / 7.5).bfloat16()
    numbers = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    tensors = {
        "weight_packed": _words((numbers + 8).int().flatten(1), 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, (numbers * scales.float()[..., None]).flatten(1)


def _signed_bytes(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = (weight.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
    numbers = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales.float()


def _float8(scale_name: str, block: tuple[int, int] | None, *, is_scalar: bool = False) -> Writer:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        num_outputs, depth = weight.shape
        rows, columns = block or ((num_outputs if is_scalar else 1), depth)
        padded = torch.zeros(-(-num_outputs // rows) * rows, -(-depth // columns) * columns)
        padded[:num_outputs, :depth] = weight
        blocks = padded.reshape(-1, rows, padded.shape[1] // columns, columns)
        scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448
        wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        wide = wide[:num_outputs, :depth]
        numbers = (weight / wide).to(_FLOAT8)
        tensors = {"weight": numbers, scale_name: scales.reshape(()) if is_scalar else scales}
        return tensors, numbers.float() * wide

    return write


def _mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = weight.reshape(len(weight), -1, 32)
    exponents = torch.frexp(groups.abs().amax(dim=-1) / 6).exponent
    scales = 2.0 ** exponents.float()
    packed, numbers = _float4(groups / scales[..., None])
    values = numbers * scales[..., None]
    tensors = {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}
    return tensors, values.flatten(1)


def _nvfp4(weight_name: str, global_name: str, *, divides: bool) -> Writer:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = weight.reshape(len(weight), -1, 16)
        factor = weight.abs().max() / (6 * 448)
        scales = (groups.abs().amax(dim=-1) / 6 / factor).to(_FLOAT8)
        wide = (scales.float() * factor)[..., None]
        packed, numbers = _float4(groups / wide.clamp(min=1e-12))
        stored = (1 / factor if divides else factor).reshape(1)
        tensors = {weight_name: packed, "weight_scale": scales, global_name: stored}
        return tensors, (numbers * wide).flatten(1)

    return write


def _float4(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes [N, K / 2] and the nearest 4-bit floats, of numbers [N, groups, group]."""
    table = torch.from_numpy(FLOAT4_TABLE)
    codes = (numbers[..., None] - table).abs().argmin(dim=-1)
    flat = codes.flatten(1).to(torch.uint8)
    return flat[:, ::2] | flat[:, 1::2] << 4, table[codes]


def _four_bits(kind: str, numbers: tuple[float, ...], *, is_nested: bool) -> Writer:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        table = torch.tensor(numbers)
        blocks = weight.reshape(-1, GROUP)
        absmax = blocks.abs().amax(dim=1)
        codes = (blocks / absmax[:, None])[..., None].sub(table).abs().argmin(dim=-1)
        flat = codes.flatten().to(torch.uint8)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": GROUP,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        tensors = {
            "weight": (flat[::2] << 4 | flat[1::2])[:, None],
            "weight.absmax": absmax,
            "weight.quant_map": table,
        }
        if is_nested:
            offset = float(absmax.mean())
            nested_map = torch.linspace(-1, 1, 256)
            spread = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256))
            largest = spread.reshape(-1, 256).abs().amax(dim=1)
            unit = largest.repeat_interleave(256)[: len(absmax)]
            nested = ((absmax - offset) / unit)[:, None].sub(nested_map).abs().argmin(dim=1)
            absmax = nested_map[nested] * unit + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors["weight.absmax"] = nested.to(torch.uint8)
            tensors |= {"weight.nested_absmax": largest, "weight.nested_quant_map": nested_map}
        name = f"weight.quant_state.bitsandbytes__{kind}"
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return tensors, (table[codes] * absmax[:, None]).reshape(weight.shape)

    return write


def _affine(
    weight: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales, zeros from 1 on, and the values that they stand for."""
    groups = weight.reshape(len(weight), -1, GROUP)
    largest = 2**bits - 1
    low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
    scales = ((high - low) / largest).clamp(min=1e-7).half()
    wide = scales.float()
    zeros = (-low / wide).round().clamp(1, largest).int()
    codes = (groups / wide[..., None]).round() + zeros[..., None]
    codes = codes.clamp(0, largest).int()
    values = (codes - zeros[..., None]) * wide[..., None]
    return codes.flatten(1), scales, zeros, values.flatten(1)


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes [N, K] into int32 [N, K * bits / 32], the first in the lowest bits."""
    parts = codes.long().reshape(len(codes), -1, 32 // bits)
    words = (parts << torch.arange(0, 32, bits)).sum(dim=-1)
    return words.to(torch.int32)


def _compressed(form: str, kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
_PACKED = _compressed("pack-quantized", "int", 4, "group", group_size=GROUP)
_NF4_CONFIG = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
}
FORMATS: dict[str, HubFormat] = {
    "AWQ": HubFormat(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq
    ),
    "GPTQ": HubFormat(_GPTQ, _gptq(1)),
    "GPTQ v2": HubFormat(_GPTQ | {"checkpoint_format": "gptq_v2"}, _gptq(0)),
    "GPTQ act-order": HubFormat(_GPTQ | {"desc_act": True}, _gptq(1, is_reordered=True)),
    "GPTQ 8 bits": HubFormat(_GPTQ | {"bits": 8}, _gptq(1, bits=8)),
    "W4A16": HubFormat(_PACKED, _symmetric_integers),
    "W4A16 asymmetric": HubFormat(_PACKED, _packed_integers),
    "W8A8": HubFormat(_compressed("int-quantized", "int", 8, "channel"), _signed_bytes),
    "FP8 tensor": HubFormat({"quant_method": "fp8"}, _float8("weight_scale", None, is_scalar=True)),
    "FP8 channel": HubFormat(
        _compressed("float-quantized", "float", 8, "channel"), _float8("weight_scale", None)
    ),
    "FP8 blocks": HubFormat(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        _float8("weight_scale_inv", (128, 128)),
    ),
    "MXFP4": HubFormat(_compressed("mxfp4-pack-quantized", "float", 4, "group"), _mxfp4),
    "NVFP4": HubFormat(
        _compressed("nvfp4-pack-quantized", "float", 4, "tensor_group"),
        _nvfp4("weight_packed", "weight_global_scale", divides=True),
    ),
    "NVFP4 ModelOpt": HubFormat(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        _nvfp4("weight", "weight_scale_2", divides=False),
    ),
    "NF4": HubFormat(_NF4_CONFIG, _four_bits("nf4", _NF4, is_nested=False)),
    "NF4 nested": HubFormat(_NF4_CONFIG, _four_bits("nf4", _NF4, is_nested=True)),
    "FP4": HubFormat(
        _NF4_CONFIG | {"bnb_4bit_quant_type": "fp4"}, _four_bits("fp4", _FP4, is_nested=False)
    ),
}
