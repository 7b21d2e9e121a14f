"""Logits of every family against transformers', in float32, on PyTorch's layers."""

import pytest
import torch

from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.config import ModelConfig
from tests.families.conftest import Saved
from tests.families.tiny import MODELS, VOCAB_SIZE
from tests.model.conftest import assert_same_logits, reference_logits
from tests.model.dense import packed_logits

CPU = torch.device("cpu")
PROMPTS = [[(7 * i + 3 * i * i) % VOCAB_SIZE for i in range(n)] for n in (90, 70)]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, saved: Saved) -> None:
    folder, reference = saved(name)
    checkpoint = open_checkpoint(ModelConfig(model=str(folder)))
    model = load_model(checkpoint, dtype=torch.float32, device=CPU)
    for prompt, logits in zip(PROMPTS, packed_logits(model, PROMPTS), strict=True):
        assert_same_logits(logits, reference_logits(reference, prompt))
