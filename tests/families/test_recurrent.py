"""Models with recurrent layers: no schedule, preemption or failed step changes their tokens."""

from itertools import count
from pathlib import Path

import msgspec
import pytest
import torch

from legato import LLM, SamplingParams
from legato.core.cache_config import CacheConfig
from legato.core.config import EngineConfig, ModelConfig, SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.outputs import FinishReason
from legato.core.plan import FIRST_STATE, ChunkResult, ScheduledChunk
from legato.core.request import AbortRequest, AddRequest
from legato.core.step_record import StepRecord
from legato.core.token_ids import token_array
from legato.engine.build import builder
from legato.engine.build.builder import build_engine
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.sequences import StepOutcome
from legato.executor.torch_executor import TorchExecutor
from legato.model.decoder import Decoder
from legato.model.native_kernels import NativeKernels
from legato.model.native_recurrence import NativeMixer
from legato.model.recurrence import RecurrentMixer
from tests.engine.rank_threads import ranks_are_threads  # noqa: F401
from tests.engine.test_faults import BROKEN
from tests.engine.tokens import tokens_of
from tests.executor.instructions import TESTED
from tests.families.conftest import Saved
from tests.families.schedules import PROMPTS, greedy
from tests.scheduler.foretold import Foretold, token_in

NAMES = ("lfm2", "qwen3.5", "qwen3-next", "granite-4-h", "falcon-h1", "nemotron-3")
"""In `MODELS`: every kind of recurrent layer, alone or beside attention, MLPs or experts."""
NUM_TOKENS = 6
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TOKENS = {
    "prompt": PROMPTS[0],
    "other": PROMPTS[1],
    "short": PROMPTS[0][:5],
    "one": PROMPTS[1][:1],
}
"""Key a name, value a prompt."""


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, saved: Saved) -> tuple[Path, dict[str, list[int]]]:
    """A checkpoint, and the tokens that transformers generates for each prompt."""
    folder, reference = saved(request.param)
    return folder, {name: greedy(reference, prompt)[0] for name, prompt in TOKENS.items()}


def config(folder: Path, *, num_requests: int = 64, budget: int = 64) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32", max_model_len=128),
        cache=CacheConfig(kv_cache_memory_bytes=2**24, block_size=8),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=budget, max_num_seqs=num_requests, admission_optimism=1.0
        ),
    )


def added(name: str, request_id: str | None = None) -> AddRequest:
    return AddRequest(
        request_id=request_id or name,
        prompt_token_ids=token_array(TOKENS[name]),
        params=msgspec.structs.replace(PARAMS, seed=0),
    )


def run(engine: EngineLoop, requests: list[AddRequest]) -> dict[str, list[int]]:
    """Run requests to their ends; key request id, value the tokens."""
    outputs = engine.step(requests)
    while engine.has_work:
        outputs += engine.step()
    return tokens_of(outputs)


def use_native_mixers(engine: EngineLoop, instructions: str) -> None:
    executor = engine._executor
    assert isinstance(executor, TorchExecutor)
    assert isinstance(executor._model, Decoder)
    kernels = NativeKernels(2, instructions)
    with torch.inference_mode():
        for module in executor._model.modules():
            if isinstance(module, RecurrentMixer):
                module.native = NativeMixer(module, kernels)


def foretold(prompts: dict[str, list[int]], outputs: dict[str, list[int]]) -> Foretold:
    """A drafter that knows the outputs, and is wrong every third time."""
    rows = {name: prompt + outputs[name] for name, prompt in prompts.items()}
    return Foretold(token_in(rows), lambda _, position: position % 3 > 0)


def check_preempted(engine: EngineLoop, requests: list[AddRequest], *, num_blocks: int) -> None:
    """Compare requests that share so few blocks with each of them alone."""
    alone = {name: tokens for r in requests for name, tokens in run(engine, [r]).items()}
    kv = engine._kv
    kv.forget()
    taken = kv.borrow(fewest=1, most=kv.num_blocks - num_blocks)
    assert run(engine, requests) == alone
    assert engine.stats.num_preemptions
    kv.give_back(taken)
    check_free(engine)


def check_free(engine: EngineLoop) -> None:
    states = engine._kv.states
    assert states is not None
    assert states.num_free == states.num_requests
    assert engine.stats.kv_usage == 0.0


@pytest.mark.parametrize("mixers", ["torch", *TESTED])
@pytest.mark.parametrize("budget", [7, 64, 100])
def test_mixed_steps_of_any_budget(
    model: tuple[Path, dict[str, list[int]]], budget: int, mixers: str
) -> None:
    """Also with native mixers, which compute in float32, in PyTorch's layers in float32."""
    folder, expected = model
    engine, info = build_engine(config(folder, budget=budget))
    if mixers != "torch":
        use_native_mixers(engine, mixers)
    assert run(engine, [added(name) for name in TOKENS]) == expected
    check_free(engine)
    assert info.settings["prefix caching"] == "on"
    assert "checkpoints (of long prompts, every 512 tokens)" in info.settings["recurrent states"]
    assert "bytes of states" in info.settings["a request costs"]


def test_failed_steps_and_aborts_leave_nothing_behind(
    model: tuple[Path, dict[str, list[int]]],
) -> None:
    """A request breaks the sampler when its step has written states; the parts then run again."""
    folder, expected = model
    engine, _ = build_engine(config(folder, budget=64))
    broken = [
        msgspec.structs.replace(added("short", f"broken {i}"), params=BROKEN) for i in range(2)
    ]
    outputs = engine.step([added("prompt"), broken[0], added("other"), added("one")])
    outputs += engine.step([added("short", "aborted")])
    outputs += engine.step([AbortRequest(request_id="aborted"), broken[1]])
    while engine.has_work:
        outputs += engine.step()
    for name in ("prompt", "other", "one"):
        tokens = [t for o in outputs if o.request_id == name for t in o.new_token_ids]
        assert tokens == expected[name]
    ends = {o.request_id: o.finish_reason for o in outputs if o.finish_reason is not None}
    assert ends["broken 0"] is ends["broken 1"] is FinishReason.ERROR
    assert ends["aborted"] is FinishReason.ABORT
    assert engine.stats.num_failed_steps >= 2
    check_free(engine)


def test_a_step_that_raises_leaves_its_source_unchanged(
    model: tuple[Path, dict[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = model
    engine, _ = build_engine(config(folder, budget=32))
    executor = engine._executor
    assert isinstance(executor, TorchExecutor)
    assert executor._states is not None
    engine.step([added("prompt")])
    plan = engine._scheduler.plan(0.0)
    assert plan is not None
    [chunk] = plan.chunks
    assert chunk.state is not None
    assert chunk.state.source >= FIRST_STATE

    def slots(slot: int) -> list[torch.Tensor]:
        assert executor._states is not None
        return [
            part[slot].clone() for states in executor._states.layers for part in states if len(part)
        ]

    before = slots(chunk.state.source)
    with monkeypatch.context() as patched:
        patched.setattr(executor, "_sample", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            executor.submit(plan)
    written = slots(chunk.state.destination)
    assert all(map(torch.equal, slots(chunk.state.source), before))
    executor.submit(plan)
    assert all(map(torch.equal, slots(chunk.state.source), before))
    assert all(map(torch.equal, slots(chunk.state.destination), written))


def test_tokens_that_are_computed_again_start_from_the_same_state(
    model: tuple[Path, dict[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the mask of a grammar is late: the last token of a chunk does not count."""
    folder, expected = model
    engine, _ = build_engine(config(folder, budget=32))
    of, calls = StepOutcome.of, count()

    def late(outcome: StepOutcome, chunk: ScheduledChunk, constraint: object) -> ChunkResult:
        is_late = chunk.num_samples and next(calls) % 3 == 0
        return chunk.unsampled() if is_late else of(outcome, chunk, constraint)  # type: ignore[arg-type]

    monkeypatch.setattr(StepOutcome, "of", late)
    assert run(engine, [added(name) for name in TOKENS]) == expected
    assert next(calls) > 3
    check_free(engine)


@pytest.mark.parametrize("swap_space_bytes", [0, 2**22])
def test_preempted_requests_get_the_same_tokens(
    model: tuple[Path, dict[str, list[int]]], swap_space_bytes: int
) -> None:
    """Blocks are too few for all streams, so some give up theirs and their states."""
    asked = config(model[0])
    cache = msgspec.structs.replace(asked.cache, swap_space_bytes=swap_space_bytes)
    engine, _ = build_engine(msgspec.structs.replace(asked, cache=cache))
    long = msgspec.structs.replace(PARAMS, max_tokens=24, seed=0)
    prompts = {str(i): PROMPTS[0][i : i + 5] for i in range(5)}
    requests = [
        AddRequest(request_id=name, prompt_token_ids=token_array(prompt), params=long)
        for name, prompt in prompts.items()
    ]
    check_preempted(engine, requests, num_blocks=9)


@pytest.mark.parametrize("mixers", ["torch", *TESTED[-1:]])
def test_drafts_change_no_token(
    model: tuple[Path, dict[str, list[int]]], mixers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(model[0])
    long = msgspec.structs.replace(PARAMS, max_tokens=20, seed=0)
    prompts = {str(i): PROMPTS[0][3 * i : 9 + 4 * i] for i in range(3)}
    requests = [
        AddRequest(request_id=name, prompt_token_ids=token_array(prompt), params=long)
        for name, prompt in prompts.items()
    ]
    plain, _ = build_engine(asked)
    if mixers != "torch":
        use_native_mixers(plain, mixers)
    expected = run(plain, requests)
    monkeypatch.setattr(builder, "OwnTokens", lambda: foretold(prompts, expected))
    scheduler = msgspec.structs.replace(asked.scheduler, speculative=5)
    engine, _ = build_engine(msgspec.structs.replace(asked, scheduler=scheduler))
    if mixers != "torch":
        use_native_mixers(engine, mixers)
    engine.set_recording(is_on=True)
    assert run(engine, requests) == expected
    steps = [record for record in engine.take_records() if isinstance(record, StepRecord)]
    assert sum(step.num_accepted_tokens for step in steps) > 20
    check_free(engine)


def test_no_more_requests_run_than_have_slots(model: tuple[Path, dict[str, list[int]]]) -> None:
    folder, _ = model
    engine, _ = build_engine(config(folder))
    states = engine._kv.states
    assert states is not None
    states.num_requests = 1
    outputs = engine.step([added("short", str(i)) for i in range(3)])
    assert engine.stats.num_running == 1
    while engine.has_work:
        outputs += engine.step()
        assert engine.stats.num_running <= 1
    assert len([o for o in outputs if o.finish_reason is FinishReason.LENGTH]) == 3
    check_free(engine)


def test_several_completions_of_a_prompt(model: tuple[Path, dict[str, list[int]]]) -> None:
    folder, expected = model
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", kv_cache_memory_bytes=2**24
    )
    engine = llm._engine
    assert isinstance(engine, EngineLoop)
    engine.set_recording(is_on=True)
    [result] = llm.generate(
        [{"prompt_token_ids": TOKENS["other"]}],
        msgspec.structs.replace(PARAMS, n=3),
        use_tqdm=False,
    )
    assert [output.token_ids for output in result.outputs] == [expected["other"]] * 3
    steps = [record for record in engine.take_records() if isinstance(record, StepRecord)]
    rest = len(TOKENS["other"]) - 64
    num_prefilled = sum(step.num_prefill_tokens for step in steps)
    assert num_prefilled == 64 + 3 * rest, "the others found the first one's state"


@pytest.mark.usefixtures("ranks_are_threads")
def test_ranks_generate_the_same_tokens(
    model: tuple[Path, dict[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks and mixed steps with drafts, and then from kept states."""
    folder, expected = model
    asked = config(folder, budget=23)
    divided = msgspec.structs.replace(asked.model, tensor_parallel_size=2)
    scheduler = msgspec.structs.replace(asked.scheduler, speculative=3)
    monkeypatch.setattr(builder, "OwnTokens", lambda: foretold(TOKENS, expected))
    engine, _ = build_engine(msgspec.structs.replace(asked, model=divided, scheduler=scheduler))
    for _ in range(2):
        assert run(engine, [added(name) for name in TOKENS]) == expected
    assert engine.stats.num_prefix_cache_hits
    check_free(engine)


def test_a_cache_without_room_for_states_is_refused(
    model: tuple[Path, dict[str, list[int]]],
) -> None:
    small = msgspec.structs.replace(
        config(model[0]), cache=CacheConfig(kv_cache_memory_bytes=2**12, block_size=8)
    )
    with pytest.raises(ConfigError, match="the recurrent states of one request need a cache of"):
        build_engine(small)
