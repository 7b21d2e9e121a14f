"""Gemma 4: layers of different geometry have cache groups of their own, and read each other's."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from legato import LLM
from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.config import EngineConfig, ModelConfig
from legato.core.errors import ConfigError, UnsupportedModelError
from legato.engine.build.builder import build_engine, load_runtime
from legato.engine.build.model_report import report_model
from legato.engine.errors import RequestFailedError
from legato.model.architectures import described
from legato.model.decoder import TokenEmbedding
from legato.model.model import CacheSpec, LayerCache
from legato.model.native_model import NativeModel
from tests.engine.rank_threads import ranks_are_threads  # noqa: F401
from tests.engine.test_tensor_parallel import poisoned_on
from tests.executor.test_native import pytestmark as needs_native
from tests.families import schedules
from tests.families.conftest import Saved
from tests.families.layouts import without
from tests.families.schedules import NUM_TOKENS, PROMPTS, generate, greedy
from tests.families.test_windows import poisoned
from tests.families.tiny import MODELS, VOCAB_SIZE, WINDOW, random_model

BYTES = 4  # of a number in float32
SLIDING, FULL = LayerCache(1, 32, WINDOW), LayerCache(1, 64)

settings = partial(schedules.settings, max_num_batched_tokens=7, max_num_seqs=4)


@pytest.fixture
def checkpoint(saved: Saved) -> tuple[Path, PreTrainedModel]:
    """Six layers like those of E2B: the last three read keys and values of the first three."""
    return saved("gemma4-e2b")


def test_layers_without_keys_and_values_of_their_own_have_no_cache(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    spec = open_checkpoint(ModelConfig(model=str(checkpoint[0]))).decoder_spec
    assert [layer.attention.kv_from for layer in spec.layers] == [None, None, None, 1, 1, 2]
    assert [spec.cache_layer(layer) for layer in range(6)] == [0, 1, 2, 1, 1, 2]
    cache = spec.cache(torch.float32)
    assert cache.layers == (SLIDING, SLIDING, FULL)
    assert cache.token_bytes == 2 * (2 * 32 + 64) * BYTES
    full, sliding = cache.groups(128)
    assert (full.layers, full.window, full.cache.layers) == ((2,), None, (FULL,))
    assert (sliding.layers, sliding.window) == ((0, 1), WINDOW)
    assert sliding.cache.layers == (SLIDING, SLIDING)
    report = report_model(ModelConfig(model=str(checkpoint[0])))
    assert report.cache_token_bytes == cache.token_bytes
    assert report.cache_bytes == 2 * (2 * 32 * WINDOW + 64 * spec.max_model_len) * BYTES


def test_groups_have_one_geometry_and_one_window() -> None:
    wide, other = LayerCache(1, 32, 48), LayerCache(2, 32)
    layers = (SLIDING, FULL, other, wide, SLIDING, FULL)
    groups = CacheSpec(layers=layers, dtype=torch.float32).groups(40)
    assert [(group.layers, group.window) for group in groups] == [
        ((1, 5), None),
        ((2,), 40),
        ((3,), 40),
        ((0, 4), WINDOW),
    ]
    assert [group.cache.layers[0] for group in groups] == [FULL, other, wide, SLIDING]


def test_the_start_tells_the_shape_of_each_groups_keys(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    given = without(settings(checkpoint[0]), "skip_tokenizer_init")
    _, info = build_engine(EngineConfig.of(**given))
    told = info.settings["window of 24 tokens, keys of 1 x 32"]
    assert told.startswith("2 layers, ")
    assert info.settings["kernels"] == "torch"


def test_requests_shorter_than_the_window_have_groups_by_geometry(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    """No layer's window is shorter than the longest request, but blocks have two sizes."""
    path, model = checkpoint
    llm = LLM(**settings(path, max_model_len=WINDOW))
    prompts = [PROMPTS[0][:17], PROMPTS[1][:16], PROMPTS[0][:17]]
    expected = [greedy(model, prompt)[0] for prompt in prompts]
    assert generate(llm, prompts) == expected
    assert generate(llm, prompts) == expected
    [group] = llm._engine._kv.windows.groups  # type: ignore[attr-defined]
    assert group.window == WINDOW
    assert llm.stats.num_prefix_cache_hits >= 16 + 8


def test_a_quantized_cache_is_read_as_it_was_written(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    """Layers that read others' keys see the same 8-bit numbers in one step as in later ones."""
    llm = LLM(**settings(checkpoint[0], kv_cache_dtype="int8", enable_prefix_caching=False))
    found = generate(llm, PROMPTS)
    engine = llm._engine
    config = engine._scheduler._config  # type: ignore[attr-defined]
    engine.reconfigure(msgspec.structs.replace(config, max_num_batched_tokens=5))
    assert generate(llm, PROMPTS) == found


@needs_native
@pytest.mark.parametrize("name", ["gemma4-e2b", "gemma4-12b"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_native_layers_give_the_same_tokens_on_any_schedule(
    name: str, kv_cache_dtype: str, saved: Saved
) -> None:
    """To the last bit: chunked at 7 and 64, and after the blocks of an earlier prompt."""
    native = {"dtype": "bfloat16", "block_size": 32, "kv_cache_dtype": kv_cache_dtype}
    llm = LLM(**settings(saved(name)[0], **native))
    engine = poisoned(llm)
    assert isinstance(engine._executor._model, NativeModel)  # type: ignore[attr-defined]
    cold = generate(llm, PROMPTS)
    assert not llm.stats.num_prefix_cache_hits
    assert generate(llm, PROMPTS) == cold
    assert llm.stats.num_prefix_cache_hits == 2 * 64
    wide = LLM(**settings(saved(name)[0], max_num_batched_tokens=64, **native))
    poisoned(wide)
    assert generate(wide, PROMPTS) == cold


def check_failure_of_rank_1(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes part in all exchanges that rank 0 waits for."""
    poison = VOCAB_SIZE - 1
    monkeypatch.setattr(TokenEmbedding, "forward", poisoned_on((1,), poison))
    with pytest.raises(RequestFailedError, match="boom"):
        generate(llm, [[5, poison, 6]])


@pytest.mark.usefixtures("ranks_are_threads")
def test_ranks_divide_experts_beside_an_mlp(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = saved("gemma4-26b-a4b")
    llm = LLM(**settings(folder, tensor_parallel_size=2, max_num_batched_tokens=64))
    assert generate(llm, PROMPTS) == [greedy(model, prompt)[0] for prompt in PROMPTS]
    check_failure_of_rank_1(llm, monkeypatch)


@pytest.mark.usefixtures("ranks_are_threads")
def test_ranks_divide_embeddings_for_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the table do not divide evenly."""
    tiny = MODELS["gemma4-e2b"]
    more = {"num_key_value_heads": 2, "vocab_size_per_layer_input": VOCAB_SIZE + 1}
    model = random_model(tiny._replace(settings={**tiny.settings, **more}))
    model.save_pretrained(tmp_path)
    spec = open_checkpoint(ModelConfig(model=str(tmp_path))).decoder_spec
    assert [layer.mlp.size for layer in spec.part(2).layers] == [48] * 3 + [96] * 3
    assert spec.part(2).cache(torch.float32).layers[-1] == LayerCache(1, 64)
    llm = LLM(**settings(tmp_path, tensor_parallel_size=2, max_num_batched_tokens=64))
    assert generate(llm, PROMPTS) == [greedy(model, prompt)[0] for prompt in PROMPTS]
    check_failure_of_rank_1(llm, monkeypatch)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"tensor_parallel_size": 2}, "an MLP of 96 or 192 cannot be divided among 2 ranks"),
}
"""Key what is asked for, value settings and the refusal."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_one_geometry_is_refused(
    name: str, checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    asked, message = REFUSED[name]
    given = without(settings(checkpoint[0], **asked), "skip_tokenizer_init")
    with pytest.raises(ConfigError, match=message):
        load_runtime(EngineConfig.of(**given))


def test_a_draft_model_has_one_geometry(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    path = str(checkpoint[0])
    with pytest.raises(ConfigError, match="which those of a draft model cannot"):
        LLM(**settings(checkpoint[0], speculative_model=path))


def test_dummy_weights_of_a_description(
    checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    contents = json.loads((checkpoint[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(contents))
    llm = LLM(**settings(tmp_path, load_format="dummy", dtype="bfloat16"))
    assert all(len(tokens) == NUM_TOKENS for tokens in generate(llm, PROMPTS))


def test_embeddings_for_each_layer_are_not_quantized(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    path, model = checkpoint
    loaded = load_model(
        open_checkpoint(ModelConfig(model=str(path))),
        dtype=torch.float32,
        device=torch.device("cpu"),
        quantization="int4",
    )
    expected = model.model.embed_tokens_per_layer.weight
    assert torch.equal(loaded.layer_inputs.embed_tokens.weight, expected)  # type: ignore[attr-defined]


def test_a_layer_reads_only_what_an_earlier_one_keeps() -> None:
    contents = {**MODELS["gemma4-e2b"].config().to_dict(), "architectures": ["Gemma4ForCausalLM"]}
    _, spec = described(contents)
    replace = msgspec.structs.replace
    for source in (0, 3, 5):
        layers = list(spec.layers)
        attention = replace(layers[5].attention, kv_from=source)
        layers[5] = replace(layers[5], attention=attention)
        message = f"layer 5 cannot read the keys and values of layer {source}"
        with pytest.raises(UnsupportedModelError, match=message):
            replace(spec, layers=tuple(layers))
