"""How a checkpoint's embeddings are pooled, by the files of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from legato.checkpoint.pooling import checkpoint_pooling
from legato.checkpoint.source import ModelSource
from legato.core.errors import UnsupportedModelError

TRANSFORMER, POOLING, NORMALIZE, DENSE = (
    {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for i, (path, kind) in enumerate(
        [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"),
         ("2_Dense", "Dense")]
    )
)  # fmt: skip


def pooling(folder: Path, modules: Any, config: dict[str, Any] | None = None) -> str | None:
    (folder / "modules.json").write_text(json.dumps(modules))
    if config is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return checkpoint_pooling(ModelSource(folder))


def test_no_files(tmp_path: Path) -> None:
    assert checkpoint_pooling(ModelSource(tmp_path)) is None
    assert checkpoint_pooling(ModelSource(tmp_path / "model.gguf")) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({}, None),
    ],
)
def test_modes(tmp_path: Path, config: dict[str, Any], expected: str | None) -> None:
    assert pooling(tmp_path, [TRANSFORMER, POOLING, NORMALIZE], config) == expected


@pytest.mark.parametrize(
    ("modules", "config", "words"),
    [
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, "pooling cls is not supported"),
        (
            [POOLING],
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            "pooling mean.max is not supported",
        ),
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode": "mean"}, "module Dense"),
        ({"0": TRANSFORMER}, None, "does not list modules"),
    ],
)
def test_refusals(tmp_path: Path, modules: Any, config: dict[str, Any] | None, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        pooling(tmp_path, modules, config)
