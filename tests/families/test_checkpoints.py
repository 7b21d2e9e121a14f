"""Models with recurrent layers compute the same tokens after a kept state as from the start."""

from pathlib import Path

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from legato import SamplingParams
from legato.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.outputs import RequestOutput
from legato.core.request import AddRequest
from legato.core.token_ids import token_array
from legato.engine.build.builder import build_engine
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.torch_executor import TorchExecutor
from tests.families.conftest import Saved
from tests.families.schedules import PROMPTS, assert_best
from tests.families.test_recurrent import NAMES
from tests.kv.conservation import check_blocks
from tests.kv.requests import request_for

BASE = [*PROMPTS[0], *PROMPTS[1]][:150]
TAILS = [[(11 * i + 7 * salt) % 97 for i in range(40)] for salt in range(4)]
NUM_TOKENS = 7
BLOCK_SIZE = 8


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, saved: Saved) -> tuple[Path, PreTrainedModel]:
    return saved(request.param)


def config(folder: Path, budget: int = 100, max_num_seqs: int = 8, **cache: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32", max_model_len=256),
        cache=CacheConfig(kv_cache_memory_bytes=2**24, block_size=BLOCK_SIZE, **cache),
        scheduler=SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs),
    )


class Client:
    """Sends prompts to an engine, one after the other, and checks the answers."""

    def __init__(self, engine: EngineLoop, reference: PreTrainedModel) -> None:
        self.engine = engine
        self.reference = reference
        self.num_sent = 0
        self.num_cached = 0
        """Of the last prompt."""

    def ask(self, *prompts: list[int]) -> list[int]:
        """Return the tokens of the last of these prompts, which are sent together."""
        requests = [self._request(prompt) for prompt in prompts]
        outputs: list[RequestOutput] = self.engine.step(requests)
        while self.engine.has_work:
            outputs += self.engine.step()
        answer: list[int] = []
        for request, prompt in zip(requests, prompts, strict=True):
            own = [output for output in outputs if output.request_id == request.request_id]
            answer = [token for output in own for token in output.new_token_ids]
            assert len(answer) == NUM_TOKENS
            assert_best(self.reference, prompt, answer)
            self.num_cached = max(output.num_cached_tokens for output in own)
        check_blocks(self.engine._kv)
        return answer

    def _request(self, prompt: list[int]) -> AddRequest:
        self.num_sent += 1
        return AddRequest(
            request_id=str(self.num_sent),
            prompt_token_ids=token_array(prompt),
            params=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=0),
        )


@pytest.mark.parametrize("budget", [7, 100])
def test_hits_at_and_between_checkpoints(model: tuple[Path, PreTrainedModel], budget: int) -> None:
    engine, _ = build_engine(config(model[0], budget))
    client = Client(engine, model[1])

    def num_cached(prompt: list[int]) -> int:
        client.ask(prompt)
        return client.num_cached

    answer = client.ask(BASE)
    assert client.num_cached == 0
    assert num_cached(BASE) == 128, "the last multiple of 64"
    assert num_cached([*BASE[:128], *TAILS[0]]) == 128
    assert num_cached([*BASE[:100], *TAILS[1]]) == 0, "no state is kept at or before 96"
    assert engine.stats.num_prefix_cache_short >= 96
    assert num_cached([*BASE[:100], *TAILS[2]]) == 64, "where the prompt before it went its own way"
    assert num_cached([*BASE, *answer, *TAILS[3]]) == 152, "the last block while it decoded"
    client.ask(*[[*BASE[:100], *TAILS[3], i] for i in range(3)])
    assert client.num_cached == 128, "they came together, so the first computed it for all"


def test_the_turns_of_a_conversation(model: tuple[Path, PreTrainedModel]) -> None:
    engine, _ = build_engine(config(model[0]))
    client = Client(engine, model[1])
    prompt, num_cached = BASE[:50], []
    for turn in range(4):
        prompt = [*prompt, *client.ask(prompt), *TAILS[turn][: 10 + turn]]
        num_cached.append(client.num_cached)
    # Prompts of 50, 67, 85 and 104 tokens, each followed by six that are computed.
    assert num_cached == [0, 56, 72, 88]


def state_after(engine: EngineLoop, tokens: list[int]) -> list[torch.Tensor]:
    """Return the state that is kept after these tokens, of each layer and part."""
    kv, executor = engine._kv, engine._executor
    way = kv.lookup.match(request_for("?", [*tokens, 0]))
    assert way.num_tokens == len(tokens)
    assert kv.states is not None
    assert isinstance(executor, TorchExecutor)
    assert executor._states is not None
    node = way.nodes[-1]
    key = node.places[(way.num_tokens - node.start) // BLOCK_SIZE - 1]
    slot = kv.states.checkpoints.slots[key]
    return [part[slot].clone() for part in executor._states.tensors if len(part)]


def test_a_state_is_the_same_however_it_was_reached(model: tuple[Path, PreTrainedModel]) -> None:
    folder, reference = model
    decoded, _ = build_engine(config(folder))
    prompt = [*BASE[:60], *Client(decoded, reference).ask(BASE[:60])]
    found = [state_after(decoded, prompt[:64])]
    for budget in (100, 64, 7):
        engine, _ = build_engine(config(folder, budget))
        Client(engine, reference).ask([*prompt, *TAILS[0]])
        found.append(state_after(engine, prompt[:64]))
    for states in found[1:]:
        for state, first in zip(states, found[0], strict=True):
            assert bool(((state - first).abs() <= 1e-4 * first.abs().max()).all())


def test_states_come_back_from_the_host(model: tuple[Path, PreTrainedModel]) -> None:
    """There are slots for one request, and blocks for little more."""
    folder, reference = model
    room = {"max_num_seqs": 1, "state_checkpoints": 0, "swap_space_bytes": 2**27}
    engine, _ = build_engine(config(folder, **room))
    client, kv = Client(engine, reference), engine._kv
    assert kv.states is not None
    prompts = [[salt, *BASE] for salt in range(4)]
    for prompt in prompts:
        client.ask(prompt)
    assert len(kv.states.checkpoints.slots) <= 2
    for prompt in prompts:
        client.ask(prompt)
        assert client.num_cached == 128


@pytest.mark.parametrize("model", ["lfm2"], indirect=True)
def test_checkpoints_have_a_budget(model: tuple[Path, PreTrainedModel]) -> None:
    folder, reference = model
    engine, info = build_engine(config(folder, max_num_seqs=2, state_checkpoints=3))
    assert "2 requests, 3 checkpoints" in info.settings["recurrent states"]
    client = Client(engine, reference)
    for salt in range(6):
        client.ask([salt, *BASE[:70]])
    assert 3 <= engine.stats.num_state_checkpoints <= 2 * 2 + 3
    with pytest.raises(ConfigError, match="1,000,000,000 state checkpoints need"):
        build_engine(config(folder, state_checkpoints=10**9))
    plain = msgspec.structs.replace(config(folder).cache, enable_prefix_caching=False)
    off, info = build_engine(msgspec.structs.replace(config(folder), cache=plain))
    assert info.settings["prefix caching"] == "off"
    Client(off, reference).ask(BASE)
    assert not off.stats.num_state_checkpoints


def test_only_recurrent_layers_have_checkpoints(saved: Saved) -> None:
    with pytest.raises(ConfigError, match="--state-checkpoints: this model has no recurrent"):
        build_engine(config(saved("llama")[0], state_checkpoints=3))
    with pytest.raises(ConfigError, match="which is turned off"):
        CacheConfig(state_checkpoints=3, enable_prefix_caching=False)
