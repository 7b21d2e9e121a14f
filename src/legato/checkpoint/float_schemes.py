"""Matrices of 8-bit and 4-bit floats: FP8, MXFP4, NVFP4, and bitsandbytes' NF4."""

import math
from collections.abc import Mapping
from typing import Annotated, Self

import msgspec
import torch

from legato.checkpoint.gguf_blocks import FLOAT4_TABLE, power_of_two
from legato.checkpoint.scheme import (
    FLOATS,
    SCALAR_SHAPES,
    Header,
    Load,
    Part,
    Parts,
    Uniform,
    nibbles,
    num_groups,
)
from legato.core.errors import UnsupportedModelError
from legato.core.validation import MAX_SIZE
from legato.model.quantization import FLOAT8_TABLE, QuantizedWeight

_FLOAT4_TABLE = torch.from_numpy(FLOAT4_TABLE)
_LARGEST_GROUP = 128
_STACKED = 3  # dimensions
_FLOAT4_BLOCK_BYTES = 16
_MAX_STATE_BYTES = 2**16
"""Of bitsandbytes' JSON beside a matrix."""


class Float8:
    """FP8 (e4m3fn) with a scale for the tensor, each output, or each block of outputs and inputs.

    Args:
        block: outputs and inputs that share a scale; None if all inputs do.
    """

    markers = ("weight_scale", "weight_scale_inv")
    suffixes = ("weight", *markers, "input_scale", "activation_scale")

    def __init__(self, block: tuple[int, int] | None) -> None:
        self._block = block

    def of(self, headers: Mapping[str, Header]) -> Self | None:
        codes = headers.get("weight")
        scales = next(headers[marker] for marker in self.markers if marker in headers)
        is_own = scales.dtype in FLOATS if codes is None else codes.dtype == "F8_E4M3"
        return self if is_own else None

    def size(self, headers: Mapping[str, Header], _: Load) -> tuple[int, int]:
        num_outputs, depth = headers["weight"].shape
        return num_outputs, depth

    def parts(self, num_outputs: int, depth: int) -> dict[str, Part]:
        if self._block is None:
            shapes: tuple[tuple[int, ...], ...] = (*SCALAR_SHAPES, (1, 1), (num_outputs, 1))
        else:
            rows, columns = self._block
            shapes = ((-(-num_outputs // rows), -(-depth // columns)),)
        scales = {marker: Part(FLOATS, shapes, is_optional=True) for marker in self.markers}
        return {"weight": Part(("F8_E4M3",), ((num_outputs, depth),)), **scales}

    def read(self, parts: Parts) -> QuantizedWeight:
        weight = parts["weight"]
        scales = next(parts[marker] for marker in self.markers if marker in parts).float()
        scales = scales.reshape(-1, scales.shape[-1] if scales.ndim else 1)
        return _float8(weight, scales, self._block or (1, weight.shape[1]))


def _float8(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> QuantizedWeight:
    """Return a matrix whose scales [rows, columns] are each of a block; one row is of all."""
    num_outputs, depth = weight.shape
    # A block may be larger than the matrix. Its scale is then repeated only within the matrix.
    rows, columns = min(block[0], num_outputs), min(block[1], depth)
    group = math.gcd(columns, depth, _LARGEST_GROUP)
    scales = scales.repeat_interleave(rows, dim=0)[:num_outputs]
    scales = scales.repeat_interleave(columns // group, dim=1)[:, : depth // group]
    scales = scales.expand(num_outputs, -1).contiguous()
    return QuantizedWeight(weight.view(torch.uint8), scales, None, 8, table=FLOAT8_TABLE)


class Float8Experts:
    """FP8 matrices of all experts in one, [experts, outputs, inputs], with scales for each.

    A scale is of an expert's matrix, of each of its fused parts, or of a block.
    """

    markers = ("_scale_inv",)
    suffixes = ("", "_scale_inv", "_activation_scale")

    def __init__(self, block: tuple[int, int] | None) -> None:
        self._block = block

    def of(self, headers: Mapping[str, Header]) -> Self | None:
        own = headers.get("")
        return self if own is not None and len(own.shape) == _STACKED else None

    def size(self, headers: Mapping[str, Header], _: Load) -> tuple[int, int]:
        weight, scales = headers[""], headers["_scale_inv"]
        count, num_outputs, depth = weight.shape
        rows, columns = self._block or (num_outputs, depth)
        blocks = -(-num_outputs // rows), -(-depth // columns)
        shapes = [(), (1,), (count,), (count, 1), (count, 1, 1), (count, *blocks)]
        if self._block is None:
            shapes.append((count, 2, 1))
        if weight.dtype != "F8_E4M3" or scales.dtype not in FLOATS or scales.shape not in shapes:
            raise UnsupportedModelError(f"its weights are {weight}, and its scales {scales}")
        return count * num_outputs, depth

    def parts(self, num_outputs: int, depth: int) -> dict[str, Part]:
        """Return nothing: the number of experts is only known to `size`, which compares them."""
        del num_outputs, depth
        return {}

    def read(self, parts: Parts) -> QuantizedWeight:
        weight = parts[""]
        count, num_outputs, depth = weight.shape
        scales = parts["_scale_inv"].float()
        scales = scales.reshape(*(scales.shape or (1,)), *[1] * (_STACKED - max(1, scales.ndim)))
        scales = scales.expand(count, -1, -1)
        rows = self._block[0] if self._block else -(-num_outputs // scales.shape[1])
        scales = scales.repeat_interleave(rows, dim=1)[:, :num_outputs]
        columns = self._block[1] if self._block else depth
        return _float8(weight.flatten(0, 1), scales.flatten(0, 1), (1, columns))


class Float4:
    """4-bit floats (e2m1) with a scale for 16 (NVFP4) or 32 (MXFP4) weights.

    Args:
        weight_name: suffix of the codes.
        scale_type: in safetensors' spelling.
        global_name: suffix of the scale for all scales, if there is one.
        divides: whether that scale divides.
    """

    markers = ("weight_scale",)

    def __init__(
        self,
        weight_name: str,
        *,
        group: int,
        scale_type: str,
        global_name: str | None = None,
        divides: bool = False,
    ) -> None:
        self._names = weight_name, global_name
        self.suffixes = tuple(
            name
            for name in (
                *(weight_name, *self.markers, global_name, "input_scale", "input_global_scale"),
            )
            if name is not None
        )
        self._group, self._scale_type, self._divides = group, scale_type, divides

    def of(self, headers: Mapping[str, Header]) -> Self | None:
        codes, scales = headers.get(self._names[0]), headers[self.markers[0]]
        is_own = scales.dtype == self._scale_type if codes is None else codes.dtype == "U8"
        return self if is_own else None

    def size(self, headers: Mapping[str, Header], _: Load) -> tuple[int, int]:
        num_outputs, num_bytes = headers[self._names[0]].shape
        return num_outputs, 2 * num_bytes

    def parts(self, num_outputs: int, depth: int) -> dict[str, Part]:
        weight_name, global_name = self._names
        groups = num_groups(depth, self._group)
        parts = {
            weight_name: Part(("U8",), ((num_outputs, depth // 2),)),
            self.markers[0]: Part((self._scale_type,), ((num_outputs, groups),)),
        }
        return (
            parts if global_name is None else parts | {global_name: Part(("F32",), SCALAR_SHAPES)}
        )

    def read(self, parts: Parts) -> QuantizedWeight:
        weight_name, global_name = self._names
        scales = parts[self.markers[0]]
        if self._scale_type == "U8":
            scales = torch.from_numpy(power_of_two(scales.numpy()))
        scales = scales.float()
        if global_name is not None:
            factor = parts[global_name].float()
            scales = scales / factor if self._divides else scales * factor
        return QuantizedWeight(nibbles(parts[weight_name]), scales, None, 4, table=_FLOAT4_TABLE)


class Float4Experts(Uniform):
    """MXFP4 of gpt-oss: the matrices of all experts in one, 32 weights to a scale."""

    markers = ("_blocks",)
    suffixes = ("_blocks", "_scales")

    def size(self, headers: Mapping[str, Header], _: Load) -> tuple[int, int]:
        count, num_outputs, groups, num_bytes = headers["_blocks"].shape
        expected = Header("U8", (count, num_outputs, groups))
        if headers["_scales"] != expected or num_bytes != _FLOAT4_BLOCK_BYTES:
            raise UnsupportedModelError(
                f"its _blocks are {headers['_blocks']}, and its _scales {headers['_scales']}"
            )
        return count * num_outputs, 2 * num_bytes * groups

    def parts(self, num_outputs: int, depth: int) -> dict[str, Part]:
        """Return nothing: the number of experts is only known to `size`, which compares them."""
        del num_outputs, depth
        return {}

    def read(self, parts: Parts) -> QuantizedWeight:
        codes = nibbles(parts["_blocks"].flatten(2).flatten(0, 1))
        scales = torch.from_numpy(power_of_two(parts["_scales"].flatten(0, 1).numpy())).float()
        return QuantizedWeight(codes, scales, None, 4, table=_FLOAT4_TABLE)


class NormalFloat4(Uniform):
    """bitsandbytes' 4 bits (Dettmers et al., 2023, arXiv:2305.14314): blocks over the flat matrix.

    The scales ("absmax") of nested checkpoints are themselves codes, in blocks of 256.
    """

    markers = ("weight.quant_map",)

    def __init__(self, kind: str) -> None:
        self._state = f"weight.quant_state.bitsandbytes__{kind}"
        self.suffixes = (
            "weight",
            "weight.absmax",
            *self.markers,
            "weight.nested_absmax",
            "weight.nested_quant_map",
            self._state,
        )

    def size(self, headers: Mapping[str, Header], load: Load) -> tuple[int, int]:
        header = headers[self._state]
        if header.dtype != "U8" or math.prod(header.shape) > _MAX_STATE_BYTES:
            raise UnsupportedModelError(
                f"{self._state} has type {header.dtype} and shape {header.shape} instead of U8 and "
                f"at most {_MAX_STATE_BYTES:,} bytes"
            )
        num_outputs, depth = _read_state(load(self._state)).shape
        return num_outputs, depth

    def parts(self, num_outputs: int, depth: int) -> dict[str, Part]:
        return {
            "weight": Part(("U8",), ((num_outputs * depth // 2, 1),)),
            self.markers[0]: Part(("F32",), ((16,),)),
            "weight.nested_quant_map": Part(("F32",), ((256,),), is_optional=True),
        }

    def read(self, parts: Parts) -> QuantizedWeight:
        state = _read_state(parts[self._state])
        num_outputs, depth = state.shape
        absmax = parts["weight.absmax"]
        num_scales = num_outputs * num_groups(depth, state.blocksize)
        _check_length("weight.absmax", absmax, num_scales)
        if absmax.dtype == torch.uint8:
            nested = parts["weight.nested_absmax"]
            _check_length("weight.nested_absmax", nested, -(-num_scales // state.nested_blocksize))
            factors = nested[torch.arange(num_scales) // state.nested_blocksize]
            absmax = parts["weight.nested_quant_map"][absmax.int()] * factors + state.nested_offset
        packed = parts["weight"].flatten()
        codes = torch.stack([packed >> 4, packed & 15], dim=-1).reshape(num_outputs, depth)
        scales = absmax.float().reshape(num_outputs, -1)
        return QuantizedWeight(codes, scales, None, 4, table=parts[self.markers[0]])


_Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]


class _State(msgspec.Struct, frozen=True):
    """What bitsandbytes writes beside a matrix; the nested fields are of its scales."""

    shape: tuple[_Size, _Size]
    blocksize: Annotated[int, msgspec.Meta(ge=16, le=MAX_SIZE)]
    nested_blocksize: _Size = 256
    nested_offset: float = 0.0


def _read_state(packed: torch.Tensor) -> _State:
    """Read JSON in bytes [N].

    Raises:
        UnsupportedModelError: it is damaged.
    """
    try:
        return msgspec.json.decode(bytes(packed.tolist()), type=_State)
    except msgspec.MsgspecError as error:
        raise UnsupportedModelError(f"the description of its 4-bit codes: {error}") from error


def _check_length(name: str, values: torch.Tensor, length: int) -> None:
    if values.shape != (length,):
        raise UnsupportedModelError(
            f"{name} has shape {tuple(values.shape)} instead of {(length,)}"
        )
