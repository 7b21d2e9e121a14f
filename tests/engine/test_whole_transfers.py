"""Prompts with windows or states, computed by one engine and continued by another."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from legato.core.cache_config import TransferConfig
from legato.core.errors import ConfigError
from legato.core.outputs import FinishReason
from legato.core.plan import FIRST_STATE
from legato.core.request import AbortRequest, AddRequest, Request
from legato.engine.loop import whole_transfers
from legato.engine.loop.whole_transfers import WholeTransfers
from legato.executor.torch_executor import TorchExecutor
from legato.kv.hold import prompt_digest
from legato.transfer import fetch, transport
from legato.transfer.block_memory import CacheMemory
from legato.transfer.protocol import RegionAt, Welcome
from tests.engine.peers import (
    PROMPT,
    Engine,
    asked,
    completions,
    expected,
    fetched,
    fetched_from,
    run,
    sent,
    transferred,
)
from tests.engine.test_transfers import StuckMover
from tests.families.tiny import MODELS, random_model

NAMES = ("gemma2", "gemma4-e2b", "lfm2", "qwen3.5", "granite-4-h")
"""A window, two geometries, and three kinds of states."""


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    random_model(MODELS[request.param]).save_pretrained(folder)
    return folder


ALONE = {"load_format": "auto", "kv_cache_memory_bytes": 2**24}


def engine(model: Path, *parts: Any, **settings: Any) -> Engine:
    """An engine with NaN in all places, so that reading one that was not written shows."""
    more = {"kv_role": "both", "max_num_seqs": 8, "kv_lease_s": 30.0, **ALONE, **settings}
    made = Engine(model, *parts, **more)
    executor = made._executor
    assert isinstance(executor, TorchExecutor)
    for blocks in executor._attention.blocks:
        blocks.fill_(torch.nan)
    for part in () if executor._states is None else executor._states.tensors:
        part[FIRST_STATE:] = torch.nan
    return made


@pytest.fixture
def prefill(model: Path) -> Iterator[Engine]:
    with closing(engine(model)) as one:
        yield one


@pytest.fixture
def decode(model: Path) -> Iterator[Engine]:
    with closing(engine(model)) as one:
        yield one


def end(one: Engine) -> int:
    """How many tokens of `PROMPT` are handed over."""
    return 288 if one.kv.states is None else 256


def both_clean(*engines: Engine) -> Callable[[], bool]:
    return lambda: all(one.is_clean for one in engines)


def test_a_prompt_goes_on_as_if_it_had_been_computed_here(
    model: Path, prefill: Engine, decode: Engine
) -> None:
    prefill.go(sent("a"))
    run(prefill, until=lambda: prefill.end("a") is not None)
    assert transferred(prefill).num_leases == 1
    decode.go(fetched("a", prefill))
    assert decode.stats.num_running == 0, "it waits for all of its prompt"
    run(prefill, decode, until=lambda: decode.end("a") is not None)
    assert decode.tokens("a") == expected(model, **ALONE)
    last = decode.end("a")
    assert last is not None
    assert last.num_cached_tokens == end(decode)
    told = transferred(decode)
    assert (told.num_fetched, told.num_recomputed) == (1, 0)
    run(prefill, decode, until=both_clean(prefill, decode))
    assert transferred(prefill).num_leases == transferred(prefill).num_expired == 0
    decode.go(asked("again"))
    run(decode, until=lambda: decode.end("again") is not None)
    assert decode.tokens("again") == decode.tokens("a")
    assert decode.end("again").num_cached_tokens == end(decode)  # type: ignore[union-attr]


def test_only_the_tail_of_windows_and_one_state_are_moved(prefill: Engine, decode: Engine) -> None:
    prefill.go(sent("a"))
    run(prefill, until=lambda: prefill.end("a") is not None)
    [handover] = prefill.kv.handovers
    windows = () if prefill.kv.windows is None else prefill.kv.windows.groups
    assert [len(ids) for ids in handover.windows] == [
        min(group.num_visible_blocks, handover.num_blocks) for group in windows
    ]
    assert (handover.slot is None) is (prefill.kv.states is None)
    decode.go(asked("before", PROMPT[:100]))
    run(decode, until=lambda: decode.end("before") is not None)
    decode.go(fetched("a", prefill))
    [received] = decode.kv.handovers
    assert received.num_found == 6, "blocks that are here are not fetched, whatever a hit needs"
    run(prefill, decode, until=lambda: decode.end("a") is not None)
    assert transferred(decode).num_fetched == 1
    run(prefill, decode, until=both_clean(prefill, decode))


def test_a_state_is_kept_for_others_close_after_a_hit(
    model: Path, prefill: Engine, decode: Engine
) -> None:
    """Else prompts have no checkpoint within 64 tokens of the last one."""
    prefill.go(asked("before", PROMPT[:208], max_tokens=1))
    run(prefill, until=lambda: prefill.end("before") is not None)
    prefill.go(sent("a", PROMPT[:270]))
    run(prefill, until=lambda: prefill.end("a") is not None)
    last = prefill.end("a")
    assert last is not None
    assert last.num_cached_tokens == 208
    decode.go(fetched("a", prefill, PROMPT[:270]))
    run(prefill, decode, until=lambda: decode.end("a") is not None)
    assert decode.tokens("a") == expected(model, PROMPT[:270], **ALONE)
    assert transferred(decode).num_fetched == 1


def test_the_engine_that_fetches_may_hear_of_it_first(
    model: Path, prefill: Engine, decode: Engine
) -> None:
    decode.go(fetched("a", prefill, is_early=True))
    prefill.go(sent("a"))
    run(prefill, decode, until=lambda: decode.end("a") is not None)
    assert decode.tokens("a") == expected(model, **ALONE)
    assert transferred(decode).num_fetched == 1
    run(prefill, decode, until=both_clean(prefill, decode))


@pytest.mark.parametrize("aborted", [None, 0, 1])
def test_one_completion_fetches_for_all(
    model: Path, prefill: Engine, decode: Engine, aborted: int | None
) -> None:
    prefill.go(sent("a"))
    run(prefill, until=lambda: prefill.end("a") is not None)
    events = completions(prefill, 2)
    decode.go(*events)
    if aborted is not None:
        decode.go(AbortRequest(request_id=f"a-{aborted}"))
        last = decode.end(f"a-{aborted}")
        assert last is not None
        assert last.finish_reason is FinishReason.ABORT
    run(prefill, decode, until=lambda: all(decode.end(event.request_id) for event in events))
    for i in range(2):
        if i != aborted:
            assert decode.tokens(f"a-{i}") == expected(model, **ALONE)
    assert transferred(decode).num_fetched == 1
    run(prefill, decode, until=both_clean(prefill, decode))
    assert transferred(prefill).num_expired == 0


def test_an_arrival_hashes_no_prompt_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def counted(message: AddRequest) -> bytes:
        hashed.append(message.request_id)
        return prompt_digest(message)

    class Handovers:
        num_found = 0

        def receive(self, _: Request) -> "Handovers":
            return self

        def places(self, _: "Handovers") -> list[int]:
            return [0]

    begun: list[bytes] = []
    kv: Any = SimpleNamespace(handovers=Handovers(), block_size=16)
    link: Any = SimpleNamespace(fetch=lambda *_, prompt_digest, **__: begun.append(prompt_digest))
    monkeypatch.setattr(whole_transfers, "prompt_digest", counted)
    transfers = WholeTransfers(kv, link)
    messages = [fetched_from(str(i), 1, [i % 20] * 50) for i in range(30)]
    for message in messages:
        assert transfers.hold_back([message]) == ([], [])
        transfers.begin(0.0)
    assert hashed == [message.request_id for message in messages]
    assert begun == [prompt_digest(message) for message in messages[:20]], "one fetch for all"


def test_where_nobody_answers_the_prompt_is_computed(model: Path, decode: Engine) -> None:
    with closing(engine(model)) as gone:
        pass
    decode.go(fetched("a", gone))
    run(decode, until=lambda: decode.end("a") is not None)
    assert decode.tokens("a") == expected(model, **ALONE)
    assert transferred(decode).num_recomputed == 1
    assert decode.is_clean


def test_another_prompts_blocks_are_not_taken(model: Path, prefill: Engine, decode: Engine) -> None:
    other = [1] * 300
    prefill.go(sent("a"))
    run(prefill, until=lambda: prefill.end("a") is not None)
    decode.go(fetched("a", prefill, other))
    run(prefill, decode, until=lambda: decode.end("a") is not None)
    assert decode.tokens("a") == expected(model, other, **ALONE)


def test_a_prefill_that_is_aborted_lets_the_other_engine_compute(
    model: Path, prefill: Engine
) -> None:
    with closing(engine(model, kv_lease_s=1.0)) as decode:
        decode.go(fetched("a", prefill, is_early=True))
        prefill.go(sent("a"))
        prefill.go(AbortRequest(request_id="a"))
        run(prefill, decode, until=lambda: decode.end("a") is not None)
        assert decode.tokens("a") == expected(model, **ALONE)
        run(prefill, decode, until=both_clean(prefill, decode))


@pytest.mark.parametrize("model", ["gemma2", "lfm2"], indirect=True)
def test_a_read_that_never_ends_costs_a_computation(
    model: Path, prefill: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes at last to places that no request has."""
    movers: list[StuckMover] = []

    def make_mover(_: TransferConfig, memory: CacheMemory) -> StuckMover:
        movers.append(StuckMover("stuck", memory))
        return movers[-1]

    monkeypatch.setattr(transport, "_STUCK_LOOK_S", 0.01)
    monkeypatch.setattr(fetch, "_MOST_BYTES", 2**14)
    prefill.go(sent("a"))
    run(prefill, until=lambda: prefill.end("a") is not None)
    with closing(engine(model, make_mover, kv_lease_s=0.3)) as decode:
        decode.go(fetched("a", prefill))
        run(decode, until=lambda: decode.end("a") is not None)
        assert decode.tokens("a") == expected(model, **ALONE)
        assert not decode.is_clean
        movers[0].reads[-1].is_freed = True
        run(decode, until=lambda: decode.is_clean)
        decode.go(asked("b"))
        run(decode, until=lambda: decode.end("b") is not None)
        assert decode.tokens("b") == decode.tokens("a")


@pytest.mark.parametrize("model", ["lfm2"], indirect=True)
def test_no_state_is_kept_for_others_without_slots(model: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-role keeps states for other engines"):
        engine(model, state_checkpoints=0)


@pytest.mark.parametrize("model", ["gemma2"], indirect=True)
def test_what_cannot_be_kept_for_others_is_computed_there(model: Path, decode: Engine) -> None:
    with closing(engine(model)) as prefill:
        assert isinstance(prefill.transfers, WholeTransfers)
        for group in prefill.kv.windows.groups:  # type: ignore[union-attr]
            group.num_spare = 0
        prefill.go(sent("a"))
        run(prefill, until=lambda: prefill.end("a") is not None)
        decode.go(fetched("a", prefill))
        run(prefill, decode, until=lambda: decode.end("a") is not None)
        assert decode.tokens("a") == expected(model, **ALONE)
        run(prefill, decode, until=both_clean(prefill, decode))


def test_messages_of_regions_survive_the_wire() -> None:
    welcome = Welcome(b"p", b"m", [[RegionAt(1, 2)], [RegionAt(3, 4), RegionAt(5, 4)]], None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(welcome), type=Welcome) == welcome
