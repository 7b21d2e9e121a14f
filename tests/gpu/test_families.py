"""Engines of model families with layers of their own, on the GPU's kernels."""

from pathlib import Path

import pytest

from tests.families.schedules import greedy
from tests.families.tiny import MODELS, VOCAB_SIZE, random_model
from tests.gpu.executors import Engine, make_executor, request
from tests.model.conftest import load

BLOCKS = {"block_size": 8, "num_blocks": 24}
PROMPT = [(7 * i + 3 * i * i) % VOCAB_SIZE for i in range(45)]
NUM_TOKENS = 3


@pytest.mark.parametrize("name", ["gemma3", "olmo3", "ministral3", "cohere2"])
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """A prompt in chunks, longer than the layers' windows."""
    reference = random_model(MODELS[name])
    reference.save_pretrained(tmp_path)
    executor, _ = make_executor(load(tmp_path), **BLOCKS, max_len=128, depth=2)
    engine = Engine(executor, **BLOCKS, max_len=128, max_num_batched_tokens=20)
    found = engine.run([request("it", PROMPT, max_tokens=NUM_TOKENS)])
    assert found == {"it": greedy(reference, PROMPT)[0][:NUM_TOKENS]}
