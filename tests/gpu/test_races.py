"""No step reads what is not there yet, and none writes what another still reads."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.core.plan import BlockMove
from legato.core.request import AddRequest
from legato.core.rows import RowCounts
from legato.gpu import host_cache
from legato.gpu.host_cache import num_staged_blocks
from legato.gpu.runner import GraphRunner
from legato.gpu.step_inputs import StagedInputs
from legato.gpu.warm_up import warm_up
from tests.gpu.deferred_twin import DeferredExecutor, DeferredTwin
from tests.gpu.executors import MAX_LEN, Engine, make_executor, request
from tests.gpu.host_twin import on_the_twin
from tests.gpu.test_end_to_end import CONFIGS
from tests.gpu.test_runner import requests
from tests.gpu.test_steps_in_flight import BLOCK_SIZE, EOS, MAX_SEQS, SETTINGS, alone, ask
from tests.gpu.token_program import VOCAB_SIZE, TokenProgram
from tests.model.conftest import SaveTiny, load, save_tiny
from tests.profiles import examples

__all__ = ["save_tiny"]

pytestmark = on_the_twin


def engine_on(twin: DeferredTwin, *, depth: int = 2, num_blocks: int = 24) -> Engine:
    """With less cache than its requests need, and room for the rest in host memory."""
    blocks, num_slots = {"block_size": BLOCK_SIZE, "num_blocks": num_blocks}, 60
    program = TokenProgram(twin, num_slots=depth * MAX_SEQS, max_len=MAX_LEN, **blocks)
    return Engine(
        DeferredExecutor(program, twin, depth=depth, host_sizes=[num_slots]),
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=40,
        admission_optimism=1.0,
        prefill_order="fcfs",
        num_slots=num_slots,
        **blocks,
    )


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three blocks, so that it is soon full. A token has two keys and two values in float32."""
    monkeypatch.setattr(host_cache, "_STAGED_BYTES", 3 * 4 * 4 * BLOCK_SIZE)


@given(
    kinds=st.lists(st.sampled_from([*SETTINGS]), min_size=1, max_size=6),
    depth=st.integers(1, 3),
    copies_early=st.booleans(),
)
@examples(8)
def test_work_that_runs_as_late_as_it_may_gives_the_same_tokens(
    kinds: list[str], depth: int, copies_early: bool
) -> None:
    asked = [ask(f"{i}" * (i + 1), kind, 1 + 7 * i % 23) for i, kind in enumerate(kinds)]
    engine = engine_on(DeferredTwin(copies_early=copies_early), depth=depth)
    assert engine.run(asked) == {one.request_id: alone(one) for one in asked}


def swapped() -> list[AddRequest]:
    """Prompts that come again once their blocks have been swapped out."""
    prompts = [[(7 * i * i + 11 * j + i) % VOCAB_SIZE for i in range(33)] for j in range(4)]
    return [
        request(f"{turn}{j}", prompt, (EOS,), max_tokens=6)
        for turn in "abc"
        for j, prompt in enumerate(prompts)
    ]


def test_kernels_graphs_and_scores_that_run_late_give_the_same_tokens(
    save_tiny: SaveTiny,
) -> None:
    plain = load(save_tiny(CONFIGS["llama"])[0])
    blocks = {"block_size": 4, "num_blocks": 24}
    settings = {**blocks, "max_num_batched_tokens": 8, "max_num_seqs": 3}
    asked = requests()[1:]
    at_once, _ = make_executor(plain, **blocks, max_rows=8)
    expected = Engine(at_once, **settings).run(asked)
    twin = DeferredTwin()
    _, program = make_executor(plain, **blocks, device=twin, max_rows=8)
    graphs = GraphRunner(program, twin, RowCounts(((4, 4),), 8), max_decodes=3)
    warm_up(program, graphs, twin)
    program.blocks[0].fill_(torch.nan)
    engine = Engine(DeferredExecutor(program, twin, graphs, depth=2), **settings)
    assert engine.run(asked) == expected


def test_swapping_takes_a_little_memory_however_much_is_swapped() -> None:
    """All of it before the first swap: a block of 32 tokens of an 8B model has four mebibytes."""
    assert num_staged_blocks(2 * BLOCK_SIZE * 2 * 4) == 3
    executor = engine_on(DeferredTwin())._executor
    assert isinstance(executor, DeferredExecutor)
    [own] = executor._host_cache._groups
    ring = own._ring
    executor.move([BlockMove(block_id=i % 24, slot=i, to_host=True) for i in range(60)])
    assert own._ring is ring
    assert len(ring) == 3


class NeverJoined(DeferredTwin):
    def join(self) -> None:
        pass


class NeverFollows(DeferredTwin):
    def beside(self, *, follows: bool) -> AbstractContextManager[None]:
        del follows
        return super().beside(follows=False)


def wrong_tokens(twin: DeferredTwin) -> bool:
    asked = swapped()
    expected = {one.request_id: alone(one) for one in asked}
    try:
        return engine_on(twin).run(asked) != expected
    except (IndexError, ValueError):
        return True  # of numbers that are no places


@pytest.mark.parametrize("copies_early", [False, True])
def test_swapped_blocks_are_where_steps_look_for_them(copies_early: bool) -> None:
    assert not wrong_tokens(DeferredTwin(copies_early=copies_early))


@pytest.mark.parametrize(
    "twin", [lambda: NeverJoined(), lambda: NeverFollows(copies_early=True)], ids=["in", "out"]
)
def test_a_swap_that_waits_for_nothing_is_found_out(twin: Callable[[], DeferredTwin]) -> None:
    assert wrong_tokens(twin())


def test_inputs_that_are_overwritten_too_early_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = [ask("a", "greedy", 9), ask("bb", "drawn", 3)]
    expected = {one.request_id: alone(one) for one in asked}
    original = StagedInputs.__init__

    def one_place(self: Any, device: Any, num_words: int, count: int) -> None:
        del count
        original(self, device, num_words, 1)

    monkeypatch.setattr(StagedInputs, "__init__", one_place)
    # One place is enough as long as it is waited for.
    assert engine_on(DeferredTwin()).run(asked) == expected
    monkeypatch.setattr(StagedInputs, "next", _next_at_once)
    engine = engine_on(DeferredTwin())
    try:
        found = engine.run(asked)
    except (IndexError, ValueError):
        return
    assert found != expected


def _next_at_once(self: Any) -> Any:
    self._turn = (self._turn + 1) % len(self._words)
    return self._words[self._turn].numpy()
