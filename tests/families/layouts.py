"""Checkpoints in other layouts than transformers', and what is compared of them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.config import ModelConfig
from legato.core.errors import UnsupportedModelError
from tests.families.tiny import MODELS, VOCAB_SIZE, random_model
from tests.model.conftest import assert_same_logits, reference_logits
from tests.model.dense import packed_logits

CPU = torch.device("cpu")
PROMPT = [(7 * i + 3 * i * i) % VOCAB_SIZE for i in range(90)]
Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


class Layout(NamedTuple):
    """Attributes:
    model: in `MODELS`.
    config: changes config.json as transformers saves it.
    tensors: changes the tensors.
    """

    model: str
    config: Callable[[Config], Config] = lambda config: config
    tensors: Callable[[Tensors], Tensors] = lambda tensors: tensors


class Refusal(NamedTuple):
    """Attributes: model: in `MODELS`; changes: of config.json; message: a pattern."""

    model: str
    changes: Config
    message: str


def without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def renamed(pattern: str, replacement: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()
    }


def change(folder: Path, layout: Layout) -> None:
    path, weights = folder / "config.json", folder / "model.safetensors"
    path.write_text(json.dumps(layout.config(json.loads(path.read_text()))))
    save_file(layout.tensors(load_file(weights)), weights)


def logits_of(folder: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(ModelConfig(model=str(folder)))
    (logits,) = packed_logits(load_model(checkpoint, dtype=torch.float32, device=CPU), [PROMPT])
    return logits


def check_logits(layout: Layout, folder: Path) -> None:
    """Compare a random model that is saved in the layout with transformers'."""
    reference = random_model(MODELS[layout.model])
    reference.save_pretrained(folder)
    change(folder, layout)
    assert_same_logits(logits_of(folder), reference_logits(reference, PROMPT))


def check_refused(refusal: Refusal, folder: Path) -> None:
    """Open a model with such a config.json."""
    config = MODELS[refusal.model].config().to_dict() | refusal.changes
    config["architectures"] = [random_model(MODELS[refusal.model]).__class__.__name__]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(UnsupportedModelError, match=refusal.message):
        open_checkpoint(ModelConfig(model=str(folder)))
