from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.families.tiny import MODELS, random_model

Saved = Callable[[str], tuple[Path, PreTrainedModel]]
"""Takes a name in `MODELS`; returns the folder of its checkpoint, and the model. Both stay so."""


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    @cache
    def save(name: str) -> tuple[Path, PreTrainedModel]:
        folder, model = tmp_path_factory.mktemp(name), random_model(MODELS[name])
        model.save_pretrained(folder)
        return folder, model

    return save
