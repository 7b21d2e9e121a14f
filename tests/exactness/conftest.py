import pytest
import torch
from transformers import PreTrainedModel

from tests.exactness.logits import transformers_model


@pytest.fixture(scope="package")
def transformers_fp32() -> PreTrainedModel:
    """Reading the file takes transformers as long as it takes to compute thousands of tokens."""
    return transformers_model(torch.float32)
