"""Layers with a sliding window keep only its blocks, and compute the same tokens.

Every block that comes free is filled with NaN, so that reading one shows in all later tokens.
"""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from legato import LLM
from legato.engine.calibration import calibration
from legato.engine.errors import RequestFailedError
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.sequences import BegunStep
from legato.executor.torch_executor import TorchExecutor
from legato.gpu.gpu_executor import GpuExecutor
from legato.model.model import CacheSpec
from tests.engine.rank_threads import ranks_are_threads  # noqa: F401
from tests.families import schedules
from tests.families.schedules import BLOCK_SIZE, assert_best
from tests.families.tiny import MODELS, VOCAB_SIZE, WINDOW, Tiny, random_model
from tests.kv.conservation import check_blocks

NUM_TOKENS = 30
"""More than a window."""
FAMILIES = {
    "gemma2": MODELS["gemma2"],
    # The sixth layer is the first without a window.
    "gemma3": Tiny("gemma3_text", {**MODELS["gemma3"].settings, "num_hidden_layers": 6}),
    "gemma4": MODELS["gemma4-e2b"],
    "gemma4-31b": MODELS["gemma4-31b"],
    "gemma4-26b-a4b": MODELS["gemma4-26b-a4b"],
}
LENGTHS = (61, 90, 34, 75)

settings = partial(
    schedules.settings, max_num_seqs=4, max_model_len=136, kv_cache_memory_bytes=2**22
)
generate = partial(schedules.generate, num_tokens=NUM_TOKENS)


def prompt(length: int, salt: int) -> list[int]:
    return [(7 * i + 3 * i * i + salt) % VOCAB_SIZE for i in range(length)]


@pytest.fixture(scope="module", params=("gemma2", "gemma3", "gemma4"))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    model = random_model(FAMILIES[request.param])
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path, model


def assert_greedy(model: PreTrainedModel, given: list[int], output: list[int]) -> None:
    assert len(output) == NUM_TOKENS
    assert_best(model, given, output)


def poisoned(llm: LLM) -> EngineLoop:
    """Fill all blocks that are free, or come free, with NaN, once their copies have been made."""
    engine = llm._engine
    assert isinstance(engine, EngineLoop)
    kv, executor = engine._kv, engine._executor
    caches = (
        executor._program.blocks
        if isinstance(executor, GpuExecutor)
        else executor._attention.blocks  # type: ignore[attr-defined]
    )
    windows = engine._kv.windows
    assert windows is not None
    for cache in caches:
        cache.fill_(_poison(cache))
    for group, cache in zip(windows.groups, caches[1:], strict=True):

        def free(block_ids: Any, own: Any = group._pool.free, cache: Any = cache) -> None:
            block_ids = list(block_ids)
            executor.move(kv.take_moves())
            cache[:, :, block_ids] = _poison(cache)
            own(block_ids)

        group._pool.free = free  # type: ignore[method-assign]
    return engine


def _poison(cache: torch.Tensor) -> float:
    """Return NaN; in a quantized cache, the bytes that make scales NaN."""
    return -1 if cache.dtype == torch.int8 else torch.nan


def test_chunked_mixed_and_with_prefix_hits(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    path, model = checkpoint
    llm = LLM(**settings(path, max_num_batched_tokens=64))
    engine = poisoned(llm)
    kv, config = engine._kv, engine._scheduler._config
    for budget in (64, 7):
        engine.reconfigure(msgspec.structs.replace(config, max_num_batched_tokens=budget))
        hits = llm.stats.num_prefix_cache_hits
        prompts = [prompt(length, budget + i) for i, length in enumerate(LENGTHS)]
        for one, output in zip(prompts, generate(llm, prompts), strict=True):
            assert_greedy(model, one, output)
        assert llm.stats.num_prefix_cache_hits == hits
        # Other ends of the same beginnings; the first is within the last window of its prompt.
        prompts = [prompts[0] + [9, 4], [*prompts[1][:70], 5], prompts[3][:17] + prompt(30, 200)]
        for one, output in zip(prompts, generate(llm, prompts), strict=True):
            assert_greedy(model, one, output)
        assert llm.stats.num_prefix_cache_hits - hits >= 56
        check_blocks(kv)


@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True)
@pytest.mark.parametrize("swap_space_bytes", [0, 2**21])
def test_preempted_in_a_full_cache(
    checkpoint: tuple[Path, PreTrainedModel], swap_space_bytes: int
) -> None:
    path, model = checkpoint
    swap = {"swap_space_bytes": swap_space_bytes}
    llm = LLM(**settings(path, max_num_batched_tokens=16, admission_optimism=1.0, **swap))
    kv = poisoned(llm)._kv
    taken = kv.borrow(fewest=1, most=kv.num_blocks - 24)
    assert taken is not None
    kv.windows.give_back(taken.windows)
    prompts = [prompt(length, i) for i, length in enumerate((34, 30, 26, 33))]
    for one, output in zip(prompts, generate(llm, prompts), strict=True):
        assert_greedy(model, one, output)
    assert llm.stats.num_preemptions > 0
    kv.give_back(taken._replace(windows=([],)))
    check_blocks(kv)
    for group in kv.windows.groups:
        assert group.num_free_blocks == group.num_blocks


@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_blocks_of_all_groups_come_back_from_the_host(
    checkpoint: tuple[Path, PreTrainedModel], kv_cache_dtype: str
) -> None:
    """The cache holds one request, and the host what all prompts need to go on."""
    path, model = checkpoint
    swap = {"max_num_seqs": 1, "swap_space_bytes": 2**24, "kv_cache_dtype": kv_cache_dtype}
    llm = LLM(**settings(path, max_num_batched_tokens=32, **swap))
    kv = poisoned(llm)._kv
    prompts = [prompt(length, i) for i, length in enumerate(LENGTHS)]
    cold = generate(llm, prompts)
    assert not llm.stats.num_prefix_cache_hits
    assert generate(llm, prompts) == cold
    shareable = [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in LENGTHS]
    assert llm.stats.num_prefix_cache_hits == sum(shareable)
    if kv_cache_dtype == "auto":
        for one, output in zip(prompts, cold, strict=True):
            assert_greedy(model, one, output)
    check_blocks(kv)
    assert all(group.spilled.num_slots for group in kv.windows.groups)


@pytest.mark.parametrize("checkpoint", ["gemma3"], indirect=True)
def test_prompts_that_begin_alike_are_computed_once(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    path, model = checkpoint
    llm = LLM(**settings(path, max_num_batched_tokens=128))
    poisoned(llm)
    alike = prompt(90, 1)
    prompts = [alike, alike, [*alike[:60], 7, 8], alike]
    for one, output in zip(prompts, generate(llm, prompts), strict=True):
        assert_greedy(model, one, output)
    assert llm.stats.num_prefix_cache_hits == 88 + 56 + 88


@pytest.mark.parametrize("checkpoint", ["gemma3"], indirect=True)
@pytest.mark.parametrize(
    ("kernels", "kv_cache_dtype"), [("auto", "auto"), ("auto", "int8"), ("torch", "int8")]
)
def test_several_groups_compute_what_one_computes(
    checkpoint: tuple[Path, PreTrainedModel],
    kernels: str,
    kv_cache_dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bfloat16, in native layers where there are any, to the last bit."""
    more = {"dtype": "bfloat16", "block_size": 32, "kernels": kernels, "max_num_batched_tokens": 24}
    prompts = [prompt(length, i) for i, length in enumerate(LENGTHS)]
    llm = LLM(**settings(checkpoint[0], kv_cache_dtype=kv_cache_dtype, **more))
    poisoned(llm)
    outputs = generate(llm, prompts)
    monkeypatch.setattr(CacheSpec, "groups", lambda cache, _: (cache.whole,))
    whole = LLM(**settings(checkpoint[0], kv_cache_dtype=kv_cache_dtype, **more))
    assert isinstance(whole._engine, EngineLoop)
    assert whole._engine._kv.windows is None
    assert generate(whole, prompts) == outputs


@pytest.mark.parametrize("checkpoint", ["gemma3", "gemma4"], indirect=True)
def test_drafts_a_failed_step_and_measured_steps(
    checkpoint: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Steps that the scheduler does not plan have tables of all groups, too."""
    path, model = checkpoint
    monkeypatch.setattr(calibration, "CALIBRATION_S", 0.3)
    llm = LLM(
        **settings(
            path,
            max_num_batched_tokens=48,
            speculative=3,
            itl_slo_s=1.0,
            calibration_dir=str(tmp_path),
        )
    )
    engine = poisoned(llm)
    given = prompt(20, 1) * 4
    assert_greedy(model, given, generate(llm, [given])[0])

    sample = TorchExecutor._sample

    def broken(executor: TorchExecutor, step: BegunStep, *others: Any) -> Any:
        if step.plan.chunks[0].request_id != "canary":
            raise RuntimeError("broken on purpose")
        return sample(executor, step, *others)

    with monkeypatch.context() as patched:
        patched.setattr(TorchExecutor, "_sample", broken)
        with pytest.raises(RequestFailedError, match="broken on purpose"):
            generate(llm, [given])
    assert_greedy(model, given, generate(llm, [given])[0])
    check_blocks(engine._kv)


@pytest.mark.parametrize("checkpoint", ["gemma2"], indirect=True)
@pytest.mark.usefixtures("ranks_are_threads")
def test_ranks_have_the_tables_of_all_groups(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    path, model = checkpoint
    more = {"tensor_parallel_size": 2, "max_num_seqs": 1, "swap_space_bytes": 2**24}
    llm = LLM(**settings(path, max_num_batched_tokens=32, **more))
    assert llm._engine._kv.windows is not None  # type: ignore[attr-defined]
    prompts = [prompt(length, i) for i, length in enumerate(LENGTHS[:2])]
    for _ in range(2):
        for one, output in zip(prompts, generate(llm, prompts), strict=True):
            assert_greedy(model, one, output)
    assert llm.stats.num_prefix_cache_hits == 56 + 88, "from the host of every rank"


def test_too_little_memory_for_one_request(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    with pytest.raises(ValueError, match="in layers with a sliding window"):
        LLM(**settings(checkpoint[0], kv_cache_memory_bytes=2**10))


def test_nothing_is_kept_for_later_without_prefix_caching(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    path, model = checkpoint
    llm = LLM(**settings(path, max_num_batched_tokens=24, enable_prefix_caching=False))
    kv = poisoned(llm)._kv
    [output] = generate(llm, [prompt(90, 3)])
    assert_greedy(model, prompt(90, 3), output)
    [group] = kv.windows.groups
    assert group.window == WINDOW
    assert group._pool.num_free == group.num_blocks
