"""An engine with a draft model: the same tokens, sooner, with any draft model."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from legato.core.cache_config import CacheConfig
from legato.core.config import EngineConfig, ModelConfig, SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.outputs import RequestOutput
from legato.core.request import AbortRequest, AddRequest, Event
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import StepRecord
from legato.core.token_ids import token_array
from legato.engine.build.builder import build_engine
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.draft_model import DraftModel
from legato.executor.torch_executor import TorchExecutor
from tests.engine.tokens import tokens_of

VOCAB_SIZE = 320
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
SETTINGS = {
    "greedy": GREEDY,
    "scored": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=2, prompt_logprobs=1),
    "drawn": SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, seed=7),
    "penalized": SamplingParams(
        temperature=0.8, max_tokens=NUM_TOKENS, seed=8, repetition_penalty=1.3
    ),
}
LONG = list(range(200))
"""A prompt that is longer than a slice beside a short step."""


def save(folder: Path, *, seed: int, vocab_size: int = VOCAB_SIZE, num_layers: int = 2) -> str:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=96,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, initializer_range=0.25,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the same vocabulary, and seldom of the same opinion."""
    return save(tmp_path_factory.mktemp("other"), seed=1, num_layers=1)


def config(
    target: str,
    draft: str | None,
    *,
    num_cache_bytes: int = 2**22,
    speculative: Any = 4,
    model: dict[str, Any] | None = None,
    **scheduler: Any,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            model=target,
            speculative_model=draft,
            **({"dtype": "float32", "kernels": "torch", "device": "cpu"} | (model or {})),
        ),
        cache=CacheConfig(kv_cache_memory_bytes=num_cache_bytes, block_size=4),
        scheduler=SchedulerConfig(
            speculative=speculative, **({"max_num_batched_tokens": 128} | scheduler)
        ),
    )


def engine(*args: Any, **settings: Any) -> EngineLoop:
    built = build_engine(config(*args, **settings))[0]
    built.set_recording(is_on=True)
    return built


def request(name: str, params: SamplingParams = GREEDY, prompt: Sequence[int] = (1,)) -> AddRequest:
    return AddRequest(request_id=name, prompt_token_ids=token_array(prompt), params=params)


def run(core: EngineLoop, events: Sequence[Event]) -> dict[str, list[int]]:
    """Tokens; key request id."""
    return tokens_of(core.step(events) + list(rest(core)))


def rest(core: EngineLoop) -> Iterator[RequestOutput]:
    while core.has_work:
        yield from core.step()


def drafts(core: EngineLoop) -> tuple[int, int]:
    """The draft model's, and how many of them were right."""
    chunks = [
        chunk
        for record in core.take_records()
        if isinstance(record, StepRecord)
        for chunk in record.chunks
        if chunk.drafter == "model"
    ]
    return sum(chunk.num_drafts for chunk in chunks), sum(chunk.num_accepted for chunk in chunks)


def draft_model(core: EngineLoop) -> DraftModel:
    found = core._scheduler._drafters._draft_model
    assert isinstance(found, DraftModel)
    return found


def mixed() -> list[AddRequest]:
    few = [
        request(name, params, range(3 * i, 5 * i + 9))
        for i, (name, params) in enumerate(SETTINGS.items())
    ]
    return [*few, request("long", GREEDY, LONG)]


@pytest.fixture(scope="module")
def plain(target: str) -> dict[str, list[int]]:
    """What the mixed requests get without drafts."""
    return run(engine(target, None, speculative="off"), mixed())


def test_a_model_drafts_for_itself_and_is_right(target: str, plain: dict[str, list[int]]) -> None:
    core = engine(target, target)
    assert run(core, mixed()) == plain
    greedy = [request(f"{i}", GREEDY, range(7 * i, 7 * i + 12)) for i in range(4)]
    drafts(core)
    run(core, greedy)
    num_drafts, num_right = drafts(core)
    assert num_drafts > NUM_TOKENS
    assert num_right > 0.95 * num_drafts


def test_another_model_changes_no_token(
    target: str, other: str, plain: dict[str, list[int]]
) -> None:
    core = engine(target, other)
    assert run(core, mixed()) == plain
    num_drafts, num_right = drafts(core)
    assert num_drafts > num_right


def test_preempted_and_more_than_the_cache_holds(target: str) -> None:
    """The caches hold some of the requests' outputs."""
    requests = [request(f"{i}", GREEDY, range(9 * i, 9 * i + 30)) for i in range(8)]
    expected = run(engine(target, None, speculative="off"), requests)
    token_bytes = 2 * 2 * 2 * 16 * 4
    core = engine(
        target,
        target,
        num_cache_bytes=2 * 4 * 70 * token_bytes,
        model={"max_model_len": 60},
        admission_optimism=1.0,
    )
    assert run(core, requests) == expected
    assert core.stats.num_preemptions > 0
    assert drafts(core)[0] > 0
    pool = draft_model(core)._pool
    assert pool.num_free == pool.num_blocks == 70


def test_aborted(target: str) -> None:
    core = engine(target, target)
    some = [request(f"{i}", GREEDY, range(9 * i, 9 * i + 9)) for i in range(4)]
    expected = run(core, some)
    outputs = core.step(some)
    for _ in range(2):
        outputs += core.step()
    outputs += core.step([AbortRequest(request_id="0"), AbortRequest(request_id="2")])
    outputs += rest(core)
    found = tokens_of(outputs)
    for name in ("1", "3"):
        assert found[name] == expected[name]
    pool = draft_model(core)._pool
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("after", [0, 3])
def test_a_broken_one_harms_no_stream(
    target: str,
    plain: dict[str, list[int]],
    after: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = engine(target, target)
    model = draft_model(core)._model
    assert isinstance(core._executor, TorchExecutor)
    assert model is not core._executor._model
    outputs = core.step(mixed())
    for _ in range(after):
        outputs += core.step()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(model, "forward", broken)
    assert tokens_of(outputs + list(rest(core))) == plain
    assert [r.getMessage() for r in caplog.records if "draft model" in r.getMessage()] == [
        "the draft model failed, and drafts nothing any more"
    ]


def test_it_is_told_at_the_start_and_holds_as_many_tokens(target: str, other: str) -> None:
    built, info = build_engine(config(target, other))
    assert info.settings["draft model"] == other
    assert "draft model" in info.start_s
    # Of three layers' keys, one is the draft model's.
    assert info.cache.num_blocks == 2**22 * 2 // 3 // (4 * 2 * 2 * 2 * 16 * 4)
    assert draft_model(built)._pool.num_blocks == info.cache.num_blocks
    assert "draft model" not in build_engine(config(target, None))[1].settings


def test_another_number_of_tokens_is_refused(target: str, tmp_path: Path) -> None:
    larger = save(tmp_path, seed=2, vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(ConfigError, match=r"has 321 tokens, and .* 320"):
        build_engine(config(target, larger))


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(VOCAB_SIZE)]
    target = with_words(tmp_path / "target", words)
    same = with_words(tmp_path / "same", words)
    build_engine(config(target, same))
    different = with_words(tmp_path / "different", [*words[:7], "other", *words[8:]])
    with pytest.raises(ConfigError, match=r"token 7 is b' other' to .*different, and b' w7' to "):
        build_engine(config(target, different))


def with_words(folder: Path, words: Sequence[str]) -> str:
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return save(folder, seed=0)


def test_what_does_not_go_with_a_draft_model(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--speculative off"):
        config(target, target, speculative="off")
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        config(target, target, model={"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="no model at"):
        build_engine(config(target, "/nowhere"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="a draft model drafts on a CPU"):
        build_engine(config(target, target, model={"device": "cuda"}))
