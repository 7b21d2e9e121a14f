"""Reads how a checkpoint's embeddings are pooled, from the files of sentence-transformers."""

from pathlib import Path
from typing import Any

import msgspec

from legato.checkpoint.json_file import read_json
from legato.checkpoint.source import ModelSource
from legato.core.errors import UnsupportedModelError
from legato.core.pooling import Pooling

_MODULES = "modules.json"
_FOLDER = "1_Pooling"
_HARMLESS = ("Transformer", "Normalize")
_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Key a field of the older files, value the same mode's name in newer ones."""


def checkpoint_pooling(source: ModelSource) -> Pooling | None:
    """Return a checkpoint's pooling; None if it has no files of sentence-transformers.

    Raises:
        UnsupportedModelError: its embeddings need more than a pooling that Legato has.
    """
    modules = None if source.is_gguf else _modules(source.path / _MODULES)
    if modules is None:
        return None
    mode: str | None = None
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            folder = source.path / (_folder(module) or _FOLDER)
            mode = _mode(read_json(folder / "config.json"))
        elif kind not in _HARMLESS:
            raise UnsupportedModelError(
                f"{source.path / _MODULES}: embeddings with a module {kind} are not supported; "
                "--pooling leaves it out"
            )
    if mode is None:
        return None
    if mode not in _MODES:
        raise UnsupportedModelError(
            f"{source.path}: pooling {mode} is not supported; --pooling takes last and mean"
        )
    return _MODES[mode]


def _modules(path: Path) -> list[dict[str, Any]] | None:
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise UnsupportedModelError(f"{path} does not list modules: {error}") from error


def _folder(module: dict[str, Any]) -> str:
    """Return the module's folder, which must be one in the checkpoint's."""
    return Path(str(module.get("path", ""))).name


def _mode(config: dict[str, Any]) -> str | None:
    """Return the mode of a pooling's configuration; several are joined by "+"."""
    named = config.get("pooling_mode")
    if named is not None:
        return named if isinstance(named, str) else "+".join(map(str, named))
    return "+".join(mode for flag, mode in _FLAGS.items() if config.get(flag)) or None
