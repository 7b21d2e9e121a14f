"""A model that is divided among ranks, under the whole engine."""

import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from legato.core.cache_config import CacheConfig
from legato.core.config import EngineConfig, ModelConfig, Quantization, SchedulerConfig, Speculative
from legato.core.errors import ConfigError
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import StepRecord
from legato.core.token_ids import token_array
from legato.engine.build.builder import build_engine
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.ranks import lockstep
from legato.model.decoder import TokenEmbedding
from legato.model.decoder_layer import DecoderLayer
from legato.model.native_kernels import native_instructions
from tests.engine.rank_threads import ranks_are_threads  # noqa: F401

pytestmark = pytest.mark.usefixtures("ranks_are_threads")

BLOCK_BYTES = 16 * 2 * 2 * 4 * 16 * 4
POISON = 321
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=9),
    "seeded": SamplingParams(temperature=1.0, max_tokens=7, seed=7),
    "penalized": SamplingParams(
        temperature=0.8, max_tokens=8, seed=8, frequency_penalty=1.0, repetition_penalty=1.3
    ),
    "scored": SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=1),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("divided"))


def saved(folder: Path, **changes: int) -> Path:
    """A model whose vocabulary does not divide by four."""
    sizes = {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4, **changes}
    config = LlamaConfig(
        vocab_size=322, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        max_position_embeddings=256, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    config.update(sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float(parameter.mean() > 0.5), std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return folder


def engine_of(
    checkpoint: Path,
    num_ranks: int,
    dtype: str = "float32",
    kernels: str = "torch",
    speculative: Speculative = "auto",
    quantization: Quantization | None = None,
    **cache: int,
) -> EngineLoop:
    cache = {"kv_cache_memory_bytes": 64 * BLOCK_BYTES, "block_size": 16, **cache}
    return build_engine(
        EngineConfig(
            model=ModelConfig(
                model=str(checkpoint),
                dtype=dtype,
                kernels=kernels,
                tensor_parallel_size=num_ranks,
                quantization=quantization,
            ),
            cache=CacheConfig(**cache),
            scheduler=SchedulerConfig(max_num_batched_tokens=50, speculative=speculative),
        )
    )[0]


def request(name: str, params: SamplingParams, first: int = 0, num_tokens: int = 30) -> AddRequest:
    prompt = [(first + 7 * i) % 322 for i in range(num_tokens)]
    return AddRequest(request_id=name, prompt_token_ids=token_array(prompt), params=params)


def requests() -> list[AddRequest]:
    """Prompts longer than a step, and alike in part."""
    return [
        request(name, params, first=i // 2, num_tokens=30 + 13 * i)
        for i, (name, params) in enumerate(SETTINGS.items())
    ]


def run(engine: EngineLoop, events: Sequence[AddRequest]) -> dict[str, list[RequestOutput]]:
    """Key request id."""
    outputs = engine.step(events)
    while engine.has_work:
        outputs += engine.step()
    return {r.request_id: [o for o in outputs if o.request_id == r.request_id] for r in events}


def tokens(outputs: dict[str, list[RequestOutput]]) -> dict[str, list[int]]:
    return {
        name: list(chain.from_iterable(output.new_token_ids for output in parts))
        for name, parts in outputs.items()
    }


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> dict[str, list[int]]:
    """What one rank generates, and with it all."""
    return tokens(run(engine_of(checkpoint, 1), requests()))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_generate_what_one_does(
    checkpoint: Path, whole: dict[str, list[int]], num_ranks: int
) -> None:
    engine = engine_of(checkpoint, num_ranks)
    found = run(engine, requests())
    assert tokens(found) == whole
    scored = found["scored"]
    assert sum(len(output.prompt_logprobs or ()) for output in scored) == 30 + 13 * 3 - 1
    assert tokens(run(engine, requests())) == whole, "with a warm cache"


def test_ranks_verify_drafts(checkpoint: Path, whole: dict[str, list[int]]) -> None:
    """Of prompts that go round, as their outputs partly do."""
    asked = [
        *requests(),
        request("repeated", SamplingParams(temperature=0.0, max_tokens=40), num_tokens=40),
    ]
    alone = tokens(run(engine_of(checkpoint, 1, speculative="off"), asked))
    assert alone.items() >= whole.items()
    engine = engine_of(checkpoint, 2, speculative=4)
    engine.set_recording(is_on=True)
    assert tokens(run(engine, asked)) == alone
    steps = [record for record in engine.take_records() if isinstance(record, StepRecord)]
    num_accepted = sum(step.num_accepted_tokens for step in steps)
    assert 0 < num_accepted < sum(step.num_draft_tokens for step in steps)


def test_blocks_come_back_from_the_host_on_all_ranks(
    checkpoint: Path, whole: dict[str, list[int]]
) -> None:
    engine = engine_of(
        checkpoint, 2, kv_cache_memory_bytes=16 * BLOCK_BYTES, swap_space_bytes=40 * BLOCK_BYTES
    )
    assert tokens(run(engine, requests())) == whole
    others = [request(f"other {i}", SETTINGS["greedy"], 90 + 50 * i, 100) for i in range(3)]
    run(engine, others)  # which take all blocks
    num_hits = engine.stats.num_prefix_cache_hits
    assert tokens(run(engine, requests()[-1:])) == {"scored": whole["scored"]}
    greedy = [request("greedy", SETTINGS["greedy"], num_tokens=30)]
    assert tokens(run(engine, greedy)) == {"greedy": whole["greedy"]}
    assert engine.stats.num_prefix_cache_hits > num_hits


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_gets_shorter_steps(
    checkpoint: Path, whole: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    forward = DecoderLayer.forward

    def starved(layer: DecoderLayer, hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        is_last = layer.self_attn.layer == 1
        if is_last and layer._communicator.rank == rank and len(hidden) > 40:
            raise MemoryError("full")
        return forward(layer, hidden, *others)

    engine = engine_of(checkpoint, 2)
    monkeypatch.setattr(DecoderLayer, "forward", starved)
    assert tokens(run(engine, requests())) == whole
    assert engine.stats.num_failed_steps > 0


def test_a_rank_without_memory_for_its_rows_of_logits_fails_one_step(
    checkpoint: Path, whole: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for this rank in an exchange, which must come about."""
    zeros, num_left = torch.zeros, 1

    def starved(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal num_left
        if num_left and sys._getframe(1).f_code.co_filename == lockstep.__file__:
            num_left -= 1
            raise MemoryError("full")
        return zeros(*args, **kwargs)

    engine = engine_of(checkpoint, 2)
    monkeypatch.setattr(torch, "zeros", starved)
    assert tokens(run(engine, requests())) == whole
    assert not num_left
    assert engine.stats.num_failed_steps == 1


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_a_request_that_a_rank_cannot_compute_ends_alone(
    checkpoint: Path,
    whole: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    ranks: tuple[int, ...],
) -> None:
    assert POISON not in chain.from_iterable([*whole.values(), *prompts_of(requests())])
    engine = engine_of(checkpoint, 2)
    monkeypatch.setattr(TokenEmbedding, "forward", poisoned_on(ranks))
    broken = AddRequest(
        request_id="broken",
        prompt_token_ids=token_array([5, POISON, 6]),
        params=SETTINGS["greedy"],
    )
    found = run(engine, [*requests()[:2], broken, *requests()[2:]])
    [output] = found.pop("broken")
    assert output.finish_reason is FinishReason.ERROR
    assert "boom" in (output.error or "")
    assert tokens(found) == whole


@pytest.mark.skipif(not native_instructions(), reason="no native kernels run here")
def test_native_kernels_compute_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one rank but for the order of sums; and a part that fails is none of the neighbours'."""
    sizes = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = saved(tmp_path, **sizes, intermediate_size=128)
    kernels = native_instructions()[0]
    engines = [engine_of(folder, count, "bfloat16", kernels, block_size=32) for count in (1, 2)]
    one, two = map(prompt_scores, engines)
    assert len(one) == 69
    assert two == pytest.approx(one, abs=0.25)
    engine = engines[1]
    monkeypatch.setattr(TokenEmbedding, "forward", poisoned_on((1,)))
    broken = AddRequest(
        request_id="broken",
        prompt_token_ids=token_array([5, POISON, 6]),
        params=SETTINGS["greedy"],
    )
    found = run(engine, [broken, request("sound", SETTINGS["greedy"])])
    assert found["broken"][-1].finish_reason is FinishReason.ERROR
    assert len(tokens(found)["sound"]) == 9


@pytest.mark.skipif(not native_instructions(), reason="no native kernels run here")
def test_ranks_round_their_own_parts(tmp_path: Path) -> None:
    """Rotated columns of a whole matrix could not be divided among ranks."""
    sizes = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = saved(tmp_path, **sizes, intermediate_size=128)
    kernels = native_instructions()[0]
    one = prompt_scores(engine_of(folder, 1, "bfloat16", kernels, block_size=32))
    two = prompt_scores(
        engine_of(folder, 2, "bfloat16", kernels, quantization="w8a8", block_size=32)
    )
    assert two != one
    assert two == pytest.approx(one, abs=0.5)


def prompt_scores(engine: EngineLoop) -> list[float]:
    """Return the log-probabilities of a prompt's tokens."""
    asked = request("scored", SETTINGS["scored"], num_tokens=70)
    parts = run(engine, [asked])["scored"]
    entries = chain.from_iterable(output.prompt_logprobs or () for output in parts)
    return [entry.logprob for entry in entries]


def test_a_part_that_is_damaged_is_refused_by_the_rank_that_reads_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    shutil.copy(checkpoint / "config.json", tmp_path)
    weights = load_file(checkpoint / "model.safetensors")
    weights[name][-1, 0] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"{name} has nan"):
        engine_of(tmp_path, 2)


def test_what_cannot_be_divided_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor-parallel-size takes 1, 2, 4 for this model"):
        engine_of(checkpoint, 3)


def test_blocks_of_which_ranks_have_parts_are_not_moved() -> None:
    with pytest.raises(ConfigError, match=r"--kv-role .* --tensor-parallel-size"):
        EngineConfig.of(model="it", kv_role="both", tensor_parallel_size=2)


def poisoned_on(
    ranks: tuple[int, ...], poison: int = POISON
) -> Callable[[TokenEmbedding, torch.Tensor], torch.Tensor]:
    """`TokenEmbedding.forward` that raises at a token."""
    forward = TokenEmbedding.forward

    def poisoned(embedding: TokenEmbedding, input_ids: torch.Tensor) -> torch.Tensor:
        rows = forward(embedding, input_ids)
        if embedding._communicator.rank in ranks and (input_ids == poison).any():
            raise ValueError("boom")
        return rows

    return poisoned


def prompts_of(events: Sequence[AddRequest]) -> list[Sequence[int]]:
    return [event.prompt_token_ids for event in events]
