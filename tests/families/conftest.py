from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.families.tiny import MODELS, random_model

Saved = Callable[[str], tuple[Path, PreTrainedModel]]
"""Takes a name in `MODELS`; returns the folder of its checkpoint, and the model. Both stay so."""


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """A second thread only waits for the first: its share of a tiny model is next to nothing."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    @cache
    def save(name: str) -> tuple[Path, PreTrainedModel]:
        folder, model = tmp_path_factory.mktemp(name), random_model(MODELS[name])
        model.save_pretrained(folder)
        return folder, model

    return save
