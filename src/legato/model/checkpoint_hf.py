"""Checkpoints in transformers' format: config.json beside safetensors files."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig

from legato.core.errors import UnsupportedModelError
from legato.model.checkpoint import Checkpoint, NamedTensors
from legato.model.defaults import read_json
from legato.model.registry import check_supported, spec_of

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_FLOAT_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def open_hf_checkpoint(folder: Path) -> Checkpoint:
    """Open a folder with config.json and safetensors files, one or sharded.

    Raises:
        UnsupportedModelError: files are missing or broken, the weights are pickled, or the model is
            one that Legato cannot run.
    """
    contents = read_json(folder / "config.json")
    if not contents:
        raise UnsupportedModelError(f"{folder} has no config.json")
    check_supported(contents)
    config = _load_config(folder)
    files = _weight_files(folder)
    dtypes = _tensor_types(files)
    return Checkpoint(
        name=str(folder),
        config=config,
        spec=spec_of(config),
        dtype=_auto_dtype(config, dtypes),
        num_tensors=len(dtypes),
        tensors=partial(_read_tensors, files),
    )


def _load_config(folder: Path) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (StrictDataclassError, ValueError, TypeError, KeyError, OSError) as error:
        raise UnsupportedModelError(f"cannot read {folder / 'config.json'}: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    index = read_json(folder / _INDEX_FILE)
    names: Sequence[str] = (
        sorted(set(index.get("weight_map", {}).values())) if index else (_SINGLE_FILE,)
    )
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return [folder / name for name in names]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise UnsupportedModelError(
            f"{folder} has only pickled weights, which can run code when loaded; convert them to "
            "safetensors with transformers' save_pretrained"
        )
    raise UnsupportedModelError(f"{folder} lacks {', '.join(missing)}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise UnsupportedModelError(
            f"{path} is not a readable safetensors file: {error}"
        ) from error


def _tensor_types(files: Sequence[Path]) -> dict[str, str]:
    """Key the tensor's name, value its type in safetensors' spelling."""
    types: dict[str, str] = {}
    for path in files:
        with _open(path) as file:
            types.update((name, file.get_slice(name).get_dtype()) for name in file.keys())  # noqa: SIM118
    return types


def _auto_dtype(config: PreTrainedConfig, types: dict[str, str]) -> torch.dtype:
    """What the configuration says, or else the weights themselves."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    names = {types[name] for name in types if name.endswith(".weight")}
    for name, dtype in _FLOAT_TYPES.items():
        if name in names:
            return dtype
    raise UnsupportedModelError(f"weights of type {', '.join(sorted(names))} are not supported")


def _read_tensors(files: Sequence[Path]) -> NamedTensors:
    for path in files:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)
