"""Embeddings equal the hidden states of transformers, in any batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from legato import LLM, SamplingParams
from legato.core.errors import InvalidRequestError
from legato.core.pooling import Pooling
from legato.llm.prompts import TokensPrompt
from tests.families.tiny import MODELS, VOCAB_SIZE, random_model

POOLINGS: tuple[Pooling, ...] = ("last", "mean")
TOLERANCE = 2e-6
"""Of each number of a vector of length 1, in fp32."""


def hidden_states(model: PreTrainedModel, prompt: list[int]) -> np.ndarray:
    """After the final norm, float64 [T, E]."""
    with torch.inference_mode():
        output = model.get_decoder()(torch.tensor([prompt]))  # type: ignore[no-untyped-call]
    states: np.ndarray = output.last_hidden_state[0].double().numpy()
    return states


def pooled(model: PreTrainedModel, prompt: list[int], pooling: Pooling) -> np.ndarray:
    return pool(hidden_states(model, prompt), pooling)


def pool(states: np.ndarray, pooling: Pooling) -> np.ndarray:
    vector: np.ndarray = states[-1] if pooling == "last" else states.mean(0)
    return vector / np.linalg.norm(vector)


def prompts_of(lists: list[list[int]]) -> list[TokensPrompt]:
    return [TokensPrompt(prompt_token_ids=ids) for ids in lists]


def embedded(llm: LLM, lists: list[list[int]], **options: Any) -> list[np.ndarray]:
    found = llm.embed(prompts_of(lists), use_tqdm=False, **options)
    return [np.array(one.outputs.embedding) for one in found]


class Tiny:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = random_model(MODELS["qwen3"])
        self.model.save_pretrained(folder)

    def llm(self, **settings: Any) -> LLM:
        sizes = {"kv_cache_memory_bytes": 2**24, "num_threads": 1, **settings}
        return LLM(str(self.folder), skip_tokenizer_init=True, device="cpu", **sizes)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def random_prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]


@pytest.mark.parametrize("budget", [7, 64])
def test_chunked(tiny: Tiny, budget: int) -> None:
    prompts = random_prompts(1, 6, 7, 8, 63, 64, 65, 200)
    llm = tiny.llm(max_num_batched_tokens=budget)
    for pooling in POOLINGS:
        for prompt, vector in zip(prompts, embedded(llm, prompts, pooling=pooling), strict=True):
            want = pooled(tiny.model, prompt, pooling)
            np.testing.assert_allclose(vector, want, atol=TOLERANCE)


def test_beside_streams_and_preempted(tiny: Tiny) -> None:
    """Streams need blocks that prompts have, whose pooling then begins again."""
    prompts = random_prompts(100, 90, 120)
    llm = tiny.llm(
        max_num_batched_tokens=8,
        block_size=16,
        max_model_len=160,
        kv_cache_memory_bytes=12 * 16 * 4 * 2 * 64 * 2 * 4,
        admission_optimism=1.0,
        prefill_order="fcfs",
    )
    streams = random_prompts(5, 9, 12)
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    alone = [
        one.outputs[0].token_ids
        for one in llm.generate(prompts_of(streams), params, use_tqdm=False)
    ]
    read = [llm._prompts.read(prompt, params) for prompt in prompts_of(streams)]
    read += [
        llm._prompts.read_pooled(prompt, pooling, None, "right")
        for prompt in prompts_of(prompts)
        for pooling in POOLINGS
    ]
    tokens: dict[int, list[int]] = {index: [] for index in range(len(read))}
    vectors: dict[int, np.ndarray] = {}
    num_before = llm.stats.num_preemptions
    for index, delta in llm._run(read):
        tokens[index] += delta.token_ids
        if delta.output.pooled is not None:
            vector = np.frombuffer(delta.output.pooled, np.float32)
            vectors[index] = vector / np.linalg.norm(vector)
    assert [tokens[index] for index in range(len(streams))] == alone
    for i, prompt in enumerate(prompts):
        for k, pooling in enumerate(POOLINGS):
            index = len(streams) + len(POOLINGS) * i + k
            assert not tokens[index]
            want = pooled(tiny.model, prompt, pooling)
            np.testing.assert_allclose(vectors[index], want, atol=TOLERANCE)
    assert llm.stats.num_preemptions > num_before


def test_prefix_hits(tiny: Tiny) -> None:
    """The last token is always computed; a mean needs all of them."""
    llm = tiny.llm(block_size=16)
    (prompt,) = random_prompts(100)
    longer = [*prompt, *random_prompts(40)[0]]
    for whole, num_cached in ((prompt, 0), (prompt, 96), (longer, 96)):
        (one,) = llm.embed(prompts_of([whole]), pooling="last", use_tqdm=False)
        assert one.num_cached_tokens == num_cached
        want = pooled(tiny.model, whole, "last")
        np.testing.assert_allclose(one.outputs.embedding, want, atol=TOLERANCE)
    (mean,) = llm.embed(prompts_of([longer]), pooling="mean", use_tqdm=False)
    assert mean.num_cached_tokens == 0
    want = pooled(tiny.model, longer, "mean")
    np.testing.assert_allclose(mean.outputs.embedding, want, atol=TOLERANCE)
    filled = random_prompts(1, 64)[1]
    llm.embed(prompts_of([filled]), pooling="mean", use_tqdm=False)
    (hit,) = llm.embed(prompts_of([filled]), pooling="last", use_tqdm=False)
    assert hit.num_cached_tokens == 48, "blocks of a mean are there for others"


def test_options_and_refusals(tiny: Tiny) -> None:
    llm = tiny.llm(max_model_len=64)
    (prompt,) = random_prompts(64)
    states = hidden_states(tiny.model, prompt)
    (raw,) = embedded(llm, [prompt], normalize=False)
    np.testing.assert_allclose(raw, states[-1], rtol=1e-4, atol=1e-5)
    (short,) = embedded(llm, [prompt], dimensions=5)
    np.testing.assert_allclose(short, raw[:5] / np.linalg.norm(raw[:5]), atol=TOLERANCE)
    (cut,) = llm.embed(prompts_of([[*prompt, 3, 4]]), truncate_prompt_tokens=-1, use_tqdm=False)
    assert cut.prompt_token_ids == prompt
    np.testing.assert_allclose(
        cut.outputs.embedding, pooled(tiny.model, prompt, "last"), atol=TOLERANCE
    )
    with pytest.raises(InvalidRequestError, match="64 tokens, but the prompt has 65"):
        embedded(llm, [[*prompt, 3]])
    with pytest.raises(InvalidRequestError, match="between 1 and 128"):
        embedded(llm, [prompt], dimensions=129)
    with pytest.raises(InvalidRequestError, match="prompt 1: the prompt is empty"):
        embedded(llm, [prompt, []])
    with pytest.raises(InvalidRequestError, match="at least 1, got 0"):
        embedded(llm, [prompt], truncate_prompt_tokens=0)
