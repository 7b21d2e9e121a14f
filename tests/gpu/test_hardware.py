"""What only a GPU can show: compiled kernels, captured graphs and real streams, in one engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu.settings import LLAMA_3_1_8B
from safetensors.torch import save_file

from legato import LLM, SamplingParams
from legato.checkpoint.loader import open_checkpoint
from legato.core.config import ModelConfig
from legato.llm.prompts import TokensPrompt

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}
"""Of heads as large as those of large models, whose tiles are another kernel's than tiny ones'."""
LENGTHS = (1, 17, 300, 900, 64)
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 50}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint: dummy weights are others on another kind of device."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B | SHAPE))
    dummy = open_checkpoint(ModelConfig(model=str(tmp_path), load_format="dummy"))
    weights = dict(dummy.tensors(torch.device("cpu")))
    save_file(weights, tmp_path / "model.safetensors")  # type: ignore[arg-type]
    return tmp_path


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    """Of prompts that share steps: decodes beside chunks, greedy ones beside sampled ones."""
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=2**27,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        **settings,
    )
    prompts = [
        TokensPrompt(prompt_token_ids=[(7 * i + length) % 4096 for i in range(length)])
        for length in LENGTHS
    ]
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, seed=i, **(SAMPLED if i % 2 else GREEDY))
        for i in range(len(LENGTHS))
    ]
    return [
        list(answer.outputs[0].token_ids)
        for answer in llm.generate(prompts, params, use_tqdm=False)
    ]


@pytest.mark.gpu
def test_tokens_are_those_of_a_cpu(folder: Path) -> None:
    expected = tokens(folder, device="cpu", kernels="torch")
    for num_steps_in_flight in (1, 2):
        found = tokens(folder, device="cuda", num_steps_in_flight=num_steps_in_flight)
        assert found == expected


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")
def test_tokens_of_two_are_those_of_one(folder: Path) -> None:
    """From graphs in which NCCL exchanges, two steps in flight."""
    expected = tokens(folder, device="cuda")
    assert tokens(folder, device="cuda", tensor_parallel_size=2) == expected
