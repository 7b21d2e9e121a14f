"""Opens checkpoints in transformers' format: config.json and safetensors files."""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open

from legato.checkpoint.base import Checkpoint
from legato.checkpoint.json_file import read_json
from legato.checkpoint.quantization_config import method_of, scheme_of
from legato.checkpoint.quantized_matrices import QuantizedMatrices
from legato.checkpoint.scheme import Header, num_bytes
from legato.core.errors import UnsupportedModelError
from legato.core.validation import check_sizes, refusing_what_fails
from legato.model.architectures import (
    check_supported,
    described,
    generates,
    text_config,
    transforms,
)
from legato.model.base import NamedWeights
from legato.model.description import Description
from legato.model.spec import DecoderSpec
from legato.model.transforms import Transform, drop, prefix, shapes_after, transformed

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_HEAD, _BARE = "score.weight", "embed_tokens.weight"
_MATRIX = 2  # dimensions
_TEXT_PARTS = {"language_model", "layers"}
_FLOAT_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def open_hf_checkpoint(folder: Path, served_len: int | None = None) -> Checkpoint:
    """Open a folder with config.json and one or more safetensors files.

    Matrices of a checkpoint with a `quantization_config` stay quantized.

    Args:
        served_len: positions that are served; None for all that the model was made for.

    Raises:
        UnsupportedModelError: files are missing or broken, the weights are pickled, or Legato
            cannot run the model.
    """
    description, spec, changes = read_description(folder, served_len)
    path = folder / "config.json"
    contents = read_json(path)
    with refusing_what_fails(path):
        scheme = scheme_of(contents)
    files = WeightFiles.of(folder)
    changes = [*_own_transforms(files.headers), *changes]
    spec, has_output = without_output(spec, contents, files.headers)
    labels = num_labels(files.headers)
    kept_bytes = {name: num_bytes(header) for name, header in files.headers.items()}
    told: dict[str, Any] = {
        "name": str(folder),
        "spec": spec,
        "architecture": text_config(contents)["architectures"][0],
        "generates": has_output,
        "num_labels": labels,
        "read_head": (lambda: files.read(_HEAD)) if labels else None,
        "kept_bytes": kept_bytes,
    }
    if scheme is None:
        check_types(files.headers)
        return Checkpoint(
            **told,
            dtype=said_dtype(description) or used_dtype(files.headers),
            shapes=shapes_after(
                {name: header.shape for name, header in files.headers.items()}, changes
            ),
            tensors=lambda _: transformed(files.tensors(files.headers), changes),
            unused=_unused(files.headers, changes),
        )
    matrices = QuantizedMatrices(str(folder), scheme, files.headers, files.read)
    check_types(matrices.others)
    shapes = {name: header.shape for name, header in matrices.others.items()}
    return Checkpoint(
        **told,
        dtype=torch.bfloat16,
        shapes=shapes_after(shapes | matrices.shapes, changes),
        tensors=lambda _: transformed(
            chain(files.tensors(matrices.others), matrices.read()), changes
        ),
        is_quantized=True,
        quantization=method_of(contents),
        unused=_unused(matrices.others, changes),
    )


def without_output(
    spec: DecoderSpec, contents: dict[str, Any], names: Container[str]
) -> tuple[DecoderSpec, bool]:
    """Return the spec for these tensors, and whether there is an output projection to generate by.

    A checkpoint for embeddings or classification has none. The embedding matrix then takes its
    place, so that layers load as always; no request samples from it.

    Args:
        contents: of config.json.
        names: of the checkpoint's tensors.
    """
    has_matrix = spec.tie_word_embeddings or "lm_head.weight" in names or _BARE not in names
    has_output = generates(contents) and has_matrix
    return (spec if has_output else replace(spec, tie_word_embeddings=True)), has_output


def num_labels(headers: Mapping[str, Header]) -> int:
    """Return the outputs of a checkpoint's classification head; 0 without one."""
    head = headers.get(_HEAD)
    return head.shape[0] if head is not None and len(head.shape) == _MATRIX else 0


def _own_transforms(names: Container[str]) -> list[Transform]:
    """Return the transforms that this checkpoint needs, before its architecture's.

    A decoder saved without a head lacks the prefix of its names. A classification head is read
    apart.
    """
    own = [drop(prefixes=(_HEAD,))] if _HEAD in names else []
    return [*own, prefix("model.", without=("lm_head.",))] if _BARE in names else own


def read_description(
    folder: Path, served_len: int | None = None
) -> tuple[Description, DecoderSpec, list[Transform]]:
    """Read a folder's config.json; return also how the checkpoint's tensors become weights.

    Args:
        served_len: positions that are served; None for all that the model was made for.

    Raises:
        UnsupportedModelError: the file is missing, or Legato cannot run the model.
    """
    path = folder / "config.json"
    contents = read_config(folder)
    with refusing_what_fails(path):
        text = text_config(contents)
        check_supported(text)
        sizes = {name: text.get(name) for name in _SIZES}
        check_sizes(path, text.get("num_hidden_layers"), **sizes)
        description, spec = described(text, served_len)
        return description, spec, transforms(contents, spec)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json; raises `UnsupportedModelError` if there are none."""
    contents = read_json(folder / "config.json")
    if not contents:
        raise UnsupportedModelError(f"{folder} has no config.json")
    return contents


def said_dtype(description: Description) -> torch.dtype | None:
    """Return the dtype that the configuration names; None if Legato does not compute in it."""
    return dtype_named(description.torch_dtype if description.dtype is None else description.dtype)


def dtype_named(name: object) -> torch.dtype | None:
    """Return the dtype of that name; None if Legato does not compute in it."""
    return next((dtype for dtype in _FLOAT_TYPES.values() if str(dtype) == f"torch.{name}"), None)


def _weight_files(folder: Path) -> list[Path]:
    index = read_json(folder / _INDEX_FILE)
    names = _shards(folder, index) if index else [_SINGLE_FILE]
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return [folder / name for name in names]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise UnsupportedModelError(
            f"{folder} has only pickled weights, which can run code when loaded; convert them to "
            "safetensors with transformers' save_pretrained"
        )
    raise UnsupportedModelError(f"{folder} lacks {', '.join(missing)}")


def _shards(folder: Path, index: dict[str, Any]) -> list[str]:
    """Return the files that an index names; all must be in the index's folder."""
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not all(
        isinstance(name, str) and name == Path(name).name for name in shards.values()
    ):
        raise UnsupportedModelError(f"{folder / _INDEX_FILE} does not name files of its folder")
    return sorted(set(shards.values()))


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise UnsupportedModelError(
            f"{path} is not a readable safetensors file: {error}"
        ) from error


class WeightFiles:
    """Open safetensors files of a checkpoint.

    Attributes:
        headers: key the tensor's name.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._file_of: dict[str, Any] = {}
        self.headers: dict[str, Header] = {}
        for path in paths:
            file = _open(path)
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensor = file.get_slice(name)
                self._file_of[name] = file
                self.headers[name] = Header(tensor.get_dtype(), tuple(tensor.get_shape()))

    @classmethod
    def of(cls, folder: Path) -> "WeightFiles":
        """Open a folder's files; raises `UnsupportedModelError` like `open_hf_checkpoint`."""
        return cls(_weight_files(folder))

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def tensors(self, names: Iterable[str]) -> NamedWeights:
        return ((name, self.read(name)) for name in names)


def check_types(headers: Mapping[str, Header]) -> None:
    """Raises `UnsupportedModelError` if a tensor has no floating type."""
    for name, header in headers.items():
        if header.dtype not in _FLOAT_TYPES:
            raise UnsupportedModelError(
                f"{name} is of type {header.dtype}; such weights are not supported"
            )


def _unused(headers: Mapping[str, Header], changes: Sequence[Transform]) -> tuple[str, ...]:
    """Return the first parts of the names of tensors that are left out, but for "model".

    Of a layer, such as one that predicts further tokens, the number is named, too.
    Keys and values that the text model's layers have but do not compute are no part.
    """
    names = (
        name.removeprefix("model.")
        for name, header in headers.items()
        if name != _HEAD and not shapes_after({name: header.shape}, changes)
    )
    parts = (name.split(".") for name in names)
    found = {".".join(part[: 1 + (part[0] == "layers")]) for part in parts}
    return tuple(sorted(found - _TEXT_PARTS))


def used_dtype(headers: Mapping[str, Header]) -> torch.dtype:
    """Return the dtype of the weights, or the first in `_FLOAT_TYPES` of several."""
    used = {header.dtype for name, header in headers.items() if name.endswith(".weight")}
    return next((dtype for name, dtype in _FLOAT_TYPES.items() if name in used), torch.float32)
