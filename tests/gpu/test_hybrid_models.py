"""Whole engines of models with recurrent layers: chunked, mixed, from graphs, two steps ahead."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.core.errors import ConfigError
from legato.core.plan import SCRATCH_STATE
from legato.core.request import AddRequest
from legato.core.rows import RowCounts
from legato.gpu.first_pass import check_first_pass
from legato.gpu.gpu_executor import GpuExecutor
from legato.gpu.runner import GraphRunner
from legato.gpu.warm_up import warm_up
from legato.kv.state_slots import StateSlots
from legato.model.decoder import Decoder
from tests.families.schedules import greedy
from tests.families.tiny import MODELS, VOCAB_SIZE, random_model
from tests.gpu.executors import Engine, device_here, make_executor, request
from tests.gpu.test_startup import engine_of as engine_of_config
from tests.gpu.test_startup import put_on_a_gpu, tokens_of
from tests.model.conftest import load
from tests.scheduler.foretold import Foretold, token_in

BLOCKS = {"block_size": 8, "num_blocks": 24}
PROMPTS = {
    name: [(7 * i + 3 * i * i + salt) % VOCAB_SIZE for i in range(length)]
    for name, length, salt in (("long", 75, 0), ("short", 9, 5), ("one", 1, 3))
}
NUM_TOKENS, MORE_TOKENS = 3, 7


NAMES = ("lfm2", "qwen3.5", "granite-4-h", "falcon-h1-normed", "nemotron-3-latent")
"""Each kind of recurrent layer."""


@pytest.fixture(scope="module", params=NAMES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Decoder, dict[str, list[int]]]:
    """A decoder, and what transformers generates for each prompt."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference = random_model(MODELS[request.param])
    reference.save_pretrained(folder)
    expected = {name: greedy(reference, prompt, MORE_TOKENS)[0] for name, prompt in PROMPTS.items()}
    return load(folder), expected


def requests() -> list[AddRequest]:
    return [request(name, prompt, max_tokens=NUM_TOKENS) for name, prompt in PROMPTS.items()]


def begun(expected: dict[str, list[int]]) -> dict[str, list[int]]:
    """The tokens of `requests`, of the more that are expected."""
    return {name: tokens[:NUM_TOKENS] for name, tokens in expected.items()}


def engine_of(executor: GpuExecutor, budget: int, **settings: Any) -> Engine:
    return Engine(
        executor,
        **BLOCKS,
        states=StateSlots(5, executor.depth, num_spare_slots=4),
        max_len=128,
        max_num_batched_tokens=budget,
        **settings,
    )


def test_greedy_tokens_are_those_of_transformers(
    model: tuple[Decoder, dict[str, list[int]]],
) -> None:
    """A second round begins after states that the first one has left."""
    plain, expected = model
    executor, _ = make_executor(plain, **BLOCKS, max_len=128, depth=2)
    engine = engine_of(executor, 30)
    assert engine.run(requests()) == begun(expected)
    engine.outputs.clear()
    assert engine.run(requests()[:1]) == {"long": begun(expected)["long"]}
    assert engine.stats.num_prefix_cache_hits
    assert engine.stats.kv_usage == 0.0


@pytest.mark.parametrize("model", ["lfm2", "qwen3.5", "granite-4-h"], indirect=True)
def test_drafts_change_no_token(model: tuple[Decoder, dict[str, list[int]]]) -> None:
    """Of an answer's drafts, every third is wrong."""
    plain, expected = model
    longer = [request(name, prompt, max_tokens=MORE_TOKENS) for name, prompt in PROMPTS.items()]
    executor, _ = make_executor(plain, **BLOCKS, max_len=128, depth=2)
    rows = {one.request_id: [*one.prompt_token_ids, *expected[one.request_id]] for one in longer}
    drafter = Foretold(token_in(rows), lambda _, position: position % 3 > 0)
    engine = engine_of(executor, 96, drafters=[drafter], speculative=3)
    engine.set_recording(is_on=True)
    assert engine.run(longer) == expected
    assert any(getattr(record, "num_accepted_tokens", 0) for record in engine.take_records())


@pytest.mark.parametrize("model", ["granite-4-h"], indirect=True)
def test_replayed_steps_are_the_steps(model: tuple[Decoder, dict[str, list[int]]]) -> None:
    """Graphs of four rows tell decodes from chunks, which recurrent layers compute apart."""
    plain, expected = model
    device = device_here()
    _, program = make_executor(plain, **BLOCKS, max_len=128, max_rows=8, device=device)
    runner = GraphRunner(program, device, RowCounts(((4, 4),), 8), max_decodes=4)
    warm_up(program, runner, device)
    assert program.states is not None
    assert not any(part.count_nonzero() for part in program.states.tensors)
    engine = engine_of(GpuExecutor(program, device, runner, depth=2), 4)
    shorter = requests()[1:]
    assert engine.run(shorter) == {name: begun(expected)[name] for name in ("short", "one")}


@pytest.mark.parametrize("model", ["lfm2"], indirect=True)
def test_a_failed_step_leaves_states_as_they_were(
    model: tuple[Decoder, dict[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails when its layers have written states; each request is then computed again, alone."""
    plain, expected = model
    executor, program = make_executor(plain, **BLOCKS, max_len=128)
    sample, num_steps = program.sample, count()

    def failing(*args: Any, **kwargs: Any) -> None:
        if next(num_steps) in (0, 3):
            raise RuntimeError("boom")
        sample(*args, **kwargs)

    monkeypatch.setattr(program, "sample", failing)
    engine = engine_of(executor, 64)
    shorter = requests()[1:]
    assert engine.run(shorter) == {name: begun(expected)[name] for name in ("short", "one")}
    assert engine.stats.num_failed_steps == 2


def test_an_engine_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the tokens of a CPU's engine, and refuses what it cannot do with states."""
    random_model(MODELS["lfm2"]).save_pretrained(tmp_path)
    expected = tokens_of(engine_of_config(tmp_path, device="cpu")[0])
    put_on_a_gpu(monkeypatch)
    engine, info = engine_of_config(tmp_path)
    assert "2 requests, " in info.settings["recurrent states"]
    assert "bytes of states (3 x " in info.settings["a request costs"]
    assert tokens_of(engine) == expected
    for refused, settings in (
        ("--swap-space on a GPU", {"swap_space_bytes": 2**20}),
        ("--kv-role on a GPU", {"kv_role": "prefill"}),
    ):
        with pytest.raises(ConfigError, match=f"do not go with {refused}"):
            engine_of_config(tmp_path, **settings)


def test_states_of_steps_outside_requests_are_lost(
    model: tuple[Decoder, dict[str, list[int]]],
) -> None:
    """Such as those of the first pass."""
    device = device_here()
    _, program = make_executor(model[0], **BLOCKS, max_len=128, device=device)
    check_first_pass(program, device, max_len=128)
    assert program.states is not None
    for part in program.states.tensors:
        if len(part):
            written = part.flatten(1).any(dim=1).nonzero().flatten()
            assert torch.equal(written.cpu(), torch.tensor([SCRATCH_STATE]))
