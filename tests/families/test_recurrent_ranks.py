"""Models with recurrent layers that are divided among ranks which share the norm of a group.

Ranks that share nothing are in test_recurrent.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from legato.checkpoint.loader import open_checkpoint
from legato.core.config import EngineConfig, ModelConfig, Quantization
from legato.core.outputs import FinishReason
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.engine.build.builder import build_engine
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.state_cache import StateCache
from legato.model.decoder import TokenEmbedding
from legato.model.native_kernels import native_instructions
from legato.model.states import StepStates
from tests.engine.rank_threads import ranks_are_threads  # noqa: F401
from tests.engine.test_tensor_parallel import poisoned_on
from tests.families.schedules import PROMPTS, greedy
from tests.families.test_recurrent import TOKENS, added, check_free, check_preempted, config, run
from tests.families.tiny import MODELS, VOCAB_SIZE, Tiny, random_model

pytestmark = pytest.mark.usefixtures("ranks_are_threads")


class Divided(NamedTuple):
    """Attributes: folder: a checkpoint; expected: what transformers generates; key a prompt."""

    folder: Path
    num_ranks: int
    expected: dict[str, list[int]]

    def engine(self, num_ranks: int | None = None, **changes: Any) -> EngineLoop:
        return build_engine(on_ranks(config(self.folder), num_ranks or self.num_ranks, changes))[0]


def tiny(name: str, **settings: Any) -> Tiny:
    return MODELS[name]._replace(settings={**MODELS[name].settings, **settings})


SHARED_NORM = tiny("granite-4-h", mamba_n_groups=1, num_key_value_heads=4)
SHARED_NORM_OF_TILES = tiny(
    "granite-4-h", mamba_n_groups=1, head_dim=32, shared_intermediate_size=128
)
CASES = {
    "granite-4-h": (4, SHARED_NORM),
    "falcon-h1": (2, tiny("falcon-h1-normed", mamba_n_groups=1)),
}
"""Key a name, value the number of ranks and a model. Ranks share the norm of a group."""


@pytest.fixture(scope="module", params=CASES)
def divided(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Divided:
    num_ranks, model = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    reference = random_model(model)
    reference.save_pretrained(folder)
    expected = {name: greedy(reference, prompt)[0] for name, prompt in TOKENS.items()}
    return Divided(folder, num_ranks, expected)


def on_ranks(asked: EngineConfig, num_ranks: int, changes: dict[str, Any]) -> EngineConfig:
    replace = msgspec.structs.replace
    return replace(
        asked,
        model=replace(asked.model, tensor_parallel_size=num_ranks, **changes.get("model", {})),
        cache=replace(asked.cache, **changes.get("cache", {})),
        scheduler=replace(asked.scheduler, **changes.get("scheduler", {})),
    )


def asked(name: str, prompt: Sequence[int], **params: Any) -> AddRequest:
    return AddRequest(
        request_id=name,
        prompt_token_ids=token_array(prompt),
        params=SamplingParams(temperature=0.0, ignore_eos=True, seed=0, **params),
    )


def test_ranks_generate_what_transformers_does(divided: Divided) -> None:
    """In chunks and mixed steps, and then from kept states."""
    engine = divided.engine(scheduler={"max_num_batched_tokens": 23})
    for _ in range(2):
        assert run(engine, [added(name) for name in TOKENS]) == divided.expected
    assert engine.stats.num_prefix_cache_hits
    check_free(engine)
    spec = open_checkpoint(ModelConfig(model=str(divided.folder))).spec
    slots, own = engine._kv.states, engine._executor._states  # type: ignore[attr-defined]
    whole = slots.num_slots * sum(shape.num_bytes(torch.float32) for shape in spec.states)
    assert sum(part.nbytes for part in own.tensors) < 1.2 * whole / divided.num_ranks


one_model = pytest.mark.parametrize("divided", ["granite-4-h"], indirect=True)


@one_model
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_bind_the_states_of_a_step_fails_that_step_alone(
    divided: Divided, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Rank 0 waits for the other in the exchanges of the step, which must come about."""
    engine = divided.engine(2)
    own, begin_step, num_left = engine._executor._states, StateCache.begin_step, 1  # type: ignore[attr-defined]

    def starved(states: StateCache, *args: Any) -> StepStates:
        nonlocal num_left
        if num_left and (states is own) == (rank == 0):
            num_left -= 1
            raise MemoryError("full")
        return begin_step(states, *args)

    monkeypatch.setattr(StateCache, "begin_step", starved)
    assert run(engine, [added(name) for name in TOKENS]) == divided.expected
    assert engine.stats.num_failed_steps == 1


@one_model
def test_states_come_back_from_the_host_on_all_ranks(divided: Divided) -> None:
    """There are slots for two requests; and then blocks for little more than one."""
    engine = divided.engine(
        2,
        cache={"swap_space_bytes": 2**27, "state_checkpoints": 0},
        scheduler={"max_num_seqs": 2},
    )
    states = engine._kv.states
    assert states is not None
    prompts = {str(salt): [salt, *PROMPTS[1]] for salt in range(5)}
    first = [run(engine, [asked(*item, max_tokens=2)]) for item in prompts.items()]
    assert len(states.checkpoints.slots) < len(prompts)
    num_hits = engine.stats.num_prefix_cache_hits
    assert [run(engine, [asked(*item, max_tokens=2)]) for item in prompts.items()] == first
    assert engine.stats.num_prefix_cache_hits == num_hits + 64 * len(prompts)
    assert run(engine, [added("prompt")]) == {"prompt": divided.expected["prompt"]}

    streams = [asked(str(i), PROMPTS[0][i : i + 5], max_tokens=24) for i in range(2)]
    check_preempted(engine, streams, num_blocks=5)


@one_model
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_leaves_states_as_they_were(
    divided: Divided, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """It still takes part in the sums of squares that the others wait for."""
    poison = VOCAB_SIZE - 1
    assert poison not in TOKENS["prompt"]
    engine = divided.engine(2)
    monkeypatch.setattr(TokenEmbedding, "forward", poisoned_on((rank,), poison))
    broken = asked("broken", [5, poison, 6], max_tokens=2)
    outputs = engine.step([added("prompt"), broken])
    while engine.has_work:
        outputs += engine.step()
    [end] = [output for output in outputs if output.request_id == "broken"]
    assert end.finish_reason is FinishReason.ERROR
    assert "boom" in (end.error or "")
    tokens = [t for o in outputs if o.request_id == "prompt" for t in o.new_token_ids]
    assert tokens == divided.expected["prompt"]
    check_free(engine)


@pytest.mark.skipif(not native_instructions(), reason="no native kernels run here")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_native_parts_compute_what_one_rank_does(
    tmp_path: Path, quantization: Quantization | None
) -> None:
    """But for the order of sums, and their rounding."""
    random_model(SHARED_NORM_OF_TILES).save_pretrained(tmp_path)
    model = {
        "dtype": "bfloat16",
        "kernels": native_instructions()[0],
        "quantization": quantization,
    }
    changes = {"model": model, "cache": {"block_size": 32}}
    one, two = (prompt_scores(Divided(tmp_path, n, {}).engine(**changes)) for n in (1, 2))
    assert len(one) == len(PROMPTS[0]) - 1
    assert two == pytest.approx(one, abs=0.02)


def prompt_scores(engine: EngineLoop) -> list[float]:
    """Return the log-probabilities of a prompt's tokens."""
    outputs = engine.step([asked("scored", PROMPTS[0], max_tokens=1, prompt_logprobs=1)])
    while engine.has_work:
        outputs += engine.step()
    return [entry.logprob for output in outputs for entry in output.prompt_logprobs or ()]
