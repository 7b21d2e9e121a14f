"""Reads the `quantization_config` of a config.json: the scheme that its matrices are held in."""

from typing import Any

from legato.checkpoint.float_schemes import Float4, Float4Experts, Float8, NormalFloat4
from legato.checkpoint.integer_schemes import Awq, Gptq, PackedIntegers, SignedBytes
from legato.checkpoint.scheme import Scheme
from legato.core.errors import UnsupportedModelError
from legato.core.validation import MAX_SIZE

_WHOLE_ROW = -1
"""Group size of scales for whole rows."""
_RANGE = f"from 1 to {MAX_SIZE:,}"


def scheme_of(contents: dict[str, Any]) -> Scheme | None:
    """Return the scheme of a checkpoint's quantized matrices; None if it has none.

    Args:
        contents: of config.json.

    Raises:
        UnsupportedModelError: an unknown method, or a setting that it cannot have here.
    """
    config = contents.get("quantization_config") or contents.get("compression_config")
    if not config:
        return None
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
    """Return the method and format of a quantized checkpoint, as `scheme_of` has accepted it."""
    config = contents.get("quantization_config") or contents.get("compression_config") or {}
    words = (config.get("quant_method"), config.get("format"), config.get("quant_algo"))
    return " ".join(dict.fromkeys(str(word) for word in words if word))


def _awq(config: dict[str, Any]) -> Scheme:
    _require(config, "bits", 4)
    _require(config, "version", "gemm", "GEMM")
    group = _group(config)
    if group is None:
        raise UnsupportedModelError("awq: group_size is -1, which is not supported")
    return Awq(group)


def _gptq(config: dict[str, Any]) -> Scheme:
    _require(config, "bits", 4, 8)
    _require(config, "checkpoint_format", "gptq", "gptq_v2", None)
    is_second = config.get("checkpoint_format") == "gptq_v2"
    return Gptq(config["bits"], _group(config), 0 if is_second else 1)


def _fp8(config: dict[str, Any]) -> Scheme:
    _require(config, "fmt", "e4m3", None)
    if config.get("weight_block_size") is None:
        return Float8("weight_scale", None)
    return Float8("weight_scale_inv", _block(config, "weight_block_size"))


def _modelopt(config: dict[str, Any]) -> Scheme:
    _require(config, "quant_algo", "FP8", "NVFP4")
    if config["quant_algo"] == "FP8":
        return Float8("weight_scale", None)
    return Float4("weight", group=16, scale_type="F8_E4M3", global_name="weight_scale_2")


def _bitsandbytes(config: dict[str, Any]) -> Scheme:
    if not config.get("load_in_4bit", config.get("_load_in_4bit")):
        raise UnsupportedModelError("bitsandbytes: only checkpoints with load_in_4bit are read")
    _require(config, "bnb_4bit_quant_type", "nf4", "fp4")
    return NormalFloat4(config["bnb_4bit_quant_type"])


def _mxfp4(_: dict[str, Any]) -> Scheme:
    return Float4Experts()


def _compressed_tensors(config: dict[str, Any]) -> Scheme:
    _require(config, "quantization_status", "compressed", None)
    if config.get("sparsity_config"):
        raise UnsupportedModelError("compressed-tensors: a sparsity_config is not supported")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise UnsupportedModelError("compressed-tensors: there are no config_groups")
    schemes = [_object(group, "config_groups").get("weights") or {} for group in groups.values()]
    schemes = [_object(scheme, "config_groups' weights") for scheme in schemes]
    weights = schemes[0]
    fields = ("num_bits", "type", "strategy", "group_size", "block_structure")
    if any(other.get(field) != weights.get(field) for other in schemes for field in fields):
        raise UnsupportedModelError(
            "compressed-tensors: groups of modules with weights of different kinds"
        )
    form = config.get("format")
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
        return Float8("weight_scale", _block(weights, "block_structure") if in_blocks else None)
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
    raise UnsupportedModelError(f"compressed-tensors: the format {form!r} is not supported")


_METHODS = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
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
