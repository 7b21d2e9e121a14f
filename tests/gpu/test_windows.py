"""Layers in groups of their own, which keep blocks of a window, and heads of their own size."""

from pathlib import Path

import pytest

from legato import LLM
from legato.engine.build import gpu
from tests.families.schedules import assert_best, generate
from tests.families.test_windows import FAMILIES, poisoned, prompt, settings
from tests.families.tiny import random_model
from tests.gpu.test_startup import put_on_a_gpu
from tests.kv.conservation import check_blocks

NUM_TOKENS = 3
LENGTHS = (50, 20)


@pytest.mark.parametrize("name", ["gemma4", "gemma4-26b-a4b"])
def test_tokens_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked, mixed, with prefix hits, and with blocks that come back from the host."""
    model = random_model(FAMILIES[name])
    model.save_pretrained(tmp_path)
    put_on_a_gpu(monkeypatch)
    monkeypatch.setattr(gpu, "warm_up", lambda *_: None)  # no graphs: the interpreter is slow
    llm = LLM(
        **settings(tmp_path, max_num_batched_tokens=24, max_num_seqs=2, swap_space_bytes=2**22)
    )
    kv = poisoned(llm)._kv
    prompts = [prompt(length, i) for i, length in enumerate(LENGTHS)]
    for _ in range(2):
        for one, output in zip(prompts, generate(llm, prompts, NUM_TOKENS), strict=True):
            assert len(output) == NUM_TOKENS
            assert_best(model, one, output)
        prompts = [[*prompts[0][:43], 9, 4], prompts[1]]
    assert llm.stats.num_prefix_cache_hits >= 40 + 16
    check_blocks(kv)
