"""Reads the `quantization_config` of a config.json: the scheme that its matrices are held in."""

from collections.abc import Mapping
from typing import Any

from legato.checkpoint.float_schemes import (
    Float4,
    Float4Experts,
    Float8,
    Float8Experts,
    NormalFloat4,
)
from legato.checkpoint.integer_schemes import GPTQ_BITS, Awq, Gptq, PackedIntegers, SignedBytes
from legato.checkpoint.scheme import Scheme
from legato.core.errors import UnsupportedModelError
from legato.core.validation import MAX_SIZE

_WHOLE_ROW = -1
"""Group size of scales for whole rows."""
_RANGE = f"from 1 to {MAX_SIZE:,}"


Schemes = tuple[Scheme, ...]


def is_quantized(contents: dict[str, Any]) -> bool:
    """Whether a config.json, or its text model's part, describes quantized matrices."""
    return bool(contents.get("quantization_config") or contents.get("compression_config"))


def schemes_of(contents: dict[str, Any]) -> Schemes:
    """Return the schemes of a checkpoint's quantized matrices; empty if it has none.

    Args:
        contents: from `text_config`.

    Raises:
        UnsupportedModelError: an unknown method, or a setting that it cannot have here.
    """
    config = contents.get("quantization_config") or contents.get("compression_config")
    if not config:
        return ()
    if not isinstance(config, dict):
        raise UnsupportedModelError("quantization_config is no object")
    method = config.get("quant_method", "none named")
    make = _METHODS.get(str(method))
    if make is None:
        raise UnsupportedModelError(
            f"the checkpoint is quantized (method {method!r}), which is not supported; Legato "
            f"reads {', '.join(_METHODS)}, GGUF files, and unquantized checkpoints"
        )
    return make(config)


def method_of(contents: dict[str, Any]) -> str:
    """Return the method and format of a quantized checkpoint, as `schemes_of` has accepted it."""
    config = contents.get("quantization_config") or contents.get("compression_config") or {}
    words = (config.get("quant_method"), config.get("format"), config.get("quant_algo"))
    return " ".join(dict.fromkeys(str(word) for word in words if word))


def _awq(config: dict[str, Any]) -> Schemes:
    _require(config, "bits", 4)
    _require(config, "version", "gemm", "GEMM")
    group = _group(config)
    if group is None:
        raise UnsupportedModelError("awq: group_size is -1, which is not supported")
    return (Awq(group),)


def _gptq(config: dict[str, Any]) -> Schemes:
    _require(config, "bits", *GPTQ_BITS)
    _require(config, "checkpoint_format", "gptq", "gptq_v2", None)
    is_second = config.get("checkpoint_format") == "gptq_v2"
    return (Gptq(config["bits"], _group(config), 0 if is_second else 1),)


def _fp8(config: dict[str, Any]) -> Schemes:
    _require(config, "fmt", "e4m3", None)
    in_blocks = config.get("weight_block_size") is not None
    block = _block(config, "weight_block_size") if in_blocks else None
    return Float8(block), Float8Experts(block)


def _modelopt(config: dict[str, Any]) -> Schemes:
    _require(config, "quant_algo", *_MODELOPT)
    return _MODELOPT[config["quant_algo"]]


_MODELOPT_FLOAT4 = Float4("weight", group=16, scale_type="F8_E4M3", global_name="weight_scale_2")
_MODELOPT: Mapping[str, Schemes] = {
    "FP8": (Float8(None),),
    "NVFP4": (_MODELOPT_FLOAT4,),
    "MIXED_PRECISION": (_MODELOPT_FLOAT4, Float8(None)),
}


def _bitsandbytes(config: dict[str, Any]) -> Schemes:
    if not config.get("load_in_4bit", config.get("_load_in_4bit")):
        raise UnsupportedModelError(
            "bitsandbytes: load_in_4bit is not true; Legato reads its 4-bit codes alone"
        )
    _require(config, "bnb_4bit_quant_type", "nf4", "fp4")
    return (NormalFloat4(config["bnb_4bit_quant_type"]),)


def _mxfp4(_: dict[str, Any]) -> Schemes:
    return (Float4Experts(),)


def _compressed_tensors(config: dict[str, Any]) -> Schemes:
    """Return a scheme for each group of modules; two groups of one kind must be alike."""
    _require(config, "quantization_status", "compressed", "frozen", None)
    sparsity = config.get("sparsity_config") or {}
    if _object(sparsity, "sparsity_config").get("format", "dense") != "dense":
        raise UnsupportedModelError(
            f"compressed-tensors: sparsity_config is {sparsity!r}; Legato reads the format 'dense'"
        )
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise UnsupportedModelError("compressed-tensors: there are no config_groups")
    found: dict[type, tuple[Any, Scheme]] = {}
    for group in groups.values():
        own = _object(group, "config_groups")
        weights = _object(own.get("weights") or {}, "config_groups' weights")
        form = own.get("format") or config.get("format")
        scheme = _of_group(form, weights)
        key = form, *map(weights.get, _GROUP_FIELDS)
        if found.setdefault(type(scheme), (key, scheme))[0] != key:
            raise UnsupportedModelError(
                "compressed-tensors: groups of modules with weights of different kinds"
            )
    return tuple(scheme for _, scheme in found.values())


_GROUP_FIELDS = ("num_bits", "type", "strategy", "group_size", "block_structure")


def _of_group(form: object, weights: dict[str, Any]) -> Scheme:
    if form == "pack-quantized":
        _require(weights, "num_bits", 4, 8)
        return PackedIntegers(weights["num_bits"], _group(weights))
    if form in ("int-quantized", "naive-quantized") and weights.get("type") == "int":
        _require(weights, "num_bits", 8)
        return SignedBytes(_group(weights))
    if form in ("float-quantized", "naive-quantized") and weights.get("type") == "float":
        _require(weights, "num_bits", 8)
        _require(weights, "strategy", "tensor", "channel", "block")
        in_blocks = weights["strategy"] == "block"
        return Float8(_block(weights, "block_structure") if in_blocks else None)
    if form == "nvfp4-pack-quantized":
        return Float4(
            "weight_packed",
            group=16,
            scale_type="F8_E4M3",
            global_name="weight_global_scale",
            divides=True,
        )
    if form == "mxfp4-pack-quantized":
        return Float4("weight_packed", group=32, scale_type="U8")
    raise UnsupportedModelError(
        f"compressed-tensors: the format {form!r} is not supported; Legato reads pack-quantized, "
        "int-quantized, float-quantized, nvfp4-pack-quantized and mxfp4-pack-quantized"
    )


_METHODS = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": lambda _: (Float8(None),),
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}


def _require(config: dict[str, Any], name: str, *values: object) -> None:
    """Refuse other values of a field; None stands for a missing one."""
    found = config.get(name)
    if found not in values:
        method = config.get("quant_method")
        told = f"{method}: " if method else ""
        raise UnsupportedModelError(
            f"{told}{name} is {found!r}; Legato reads {' and '.join(map(repr, values))}"
        )


def _group(config: dict[str, Any]) -> int | None:
    """Return the inputs that share a scale; None if a row has one scale."""
    size = config.get("group_size")
    if size is None or size == _WHOLE_ROW:
        return None
    if not _is_size(size):
        raise UnsupportedModelError(f"group_size is {size!r} instead of a number {_RANGE}")
    return int(size)


def _block(config: dict[str, Any], name: str) -> tuple[int, int]:
    """Return the outputs and inputs that share a scale."""
    block = config.get(name)
    if not (isinstance(block, list) and len(block) == 2 and all(map(_is_size, block))):
        raise UnsupportedModelError(f"{name} is {block!r} instead of two numbers {_RANGE}")
    return block[0], block[1]


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{name} is {value!r} instead of an object")
    return value


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= MAX_SIZE
