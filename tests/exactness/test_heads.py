"""Checkpoints without an output projection, and with a classification head in its place."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from legato import LLM, SamplingParams
from legato.core.errors import InvalidRequestError, UnsupportedModelError
from tests.exactness.test_embeddings import TOLERANCE, embedded, pooled, prompts_of, random_prompts
from tests.families.tiny import MODELS, random_model

FAMILIES = ("llama", "qwen3", "mistral", "gemma3")


def tiny_llm(folder: Path, **settings: Any) -> LLM:
    sizes = {"kv_cache_memory_bytes": 2**24, "num_threads": 1, "dtype": "float32", **settings}
    return LLM(str(folder), skip_tokenizer_init=True, device="cpu", **sizes)


def classifier(family: str, folder: Path, num_labels: int) -> PreTrainedModel:
    config = MODELS[family].config()
    config.num_labels = num_labels
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    decoder = random_model(MODELS[family]).get_decoder()  # type: ignore[no-untyped-call]
    model.model.load_state_dict(decoder.state_dict())
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    model = classifier(family, tmp_path, 1)
    llm = tiny_llm(tmp_path, max_num_batched_tokens=16)
    prompts = random_prompts(1, 7, 40)
    read = [
        llm._prompts.read_pooled(one, "last", None, "right")._replace(pooling="score")
        for one in prompts_of(prompts)
    ]
    found = {index: delta.output.pooled for index, delta in llm._run(read)}
    for index, prompt in enumerate(prompts):
        with torch.inference_mode():
            (want,) = model(torch.tensor([prompt])).logits[0].tolist()
        pooled_bytes = found[index]
        assert pooled_bytes is not None
        assert np.frombuffer(pooled_bytes, np.float32).tolist() == pytest.approx([want], rel=1e-4)
    with pytest.raises(InvalidRequestError, match="no output projection"):
        llm.generate(prompts_of(prompts), SamplingParams(max_tokens=2), use_tqdm=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["base", "causal"])
def test_a_decoder_saved_without_its_head(family: str, name: str, tmp_path: Path) -> None:
    """Names lack their prefix; some checkpoints still name a causal architecture."""
    model = random_model(MODELS[family])
    model.get_decoder().save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    if name == "causal":
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "architectures": [type(model).__name__]}))
    llm = tiny_llm(tmp_path)
    prompts = random_prompts(1, 33)
    for prompt, vector in zip(prompts, embedded(llm, prompts), strict=True):
        np.testing.assert_allclose(vector, pooled(model, prompt, "last"), atol=TOLERANCE)
    assert llm.info.generates == (name == "causal" and model.config.tie_word_embeddings)


def test_a_model_without_a_head_refuses_scores(tmp_path: Path) -> None:
    random_model(MODELS["llama"]).save_pretrained(tmp_path)
    llm = tiny_llm(tmp_path)
    (prompt,) = random_prompts(4)
    read = llm._prompts.read_pooled(prompts_of([prompt])[0], "last", None, "right")
    with pytest.raises(InvalidRequestError, match="and this model has none"):
        list(llm._run([read._replace(pooling="score")]))


def test_other_numbers_of_labels_are_no_scores(tmp_path: Path) -> None:
    classifier("llama", tmp_path, 3)
    llm = tiny_llm(tmp_path)
    read = llm._prompts.read_pooled(prompts_of(random_prompts(4))[0], "last", None, "right")
    with pytest.raises(InvalidRequestError, match="one with 3 labels"):
        list(llm._run([read._replace(pooling="score")]))


def test_a_decoder_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    random_model(MODELS["llama"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_causal": False}))
    with pytest.raises(UnsupportedModelError, match="later tokens"):
        tiny_llm(tmp_path)
