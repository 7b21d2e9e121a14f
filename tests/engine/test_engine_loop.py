"""The loop with a simulated executor whose steps sometimes fail."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from legato.core.config import SchedulerConfig
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.plan import StepPlan, StepResult
from legato.core.request import AbortRequest, AddRequest, Request
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.engine.errors import EngineFaultError
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.simulated import SimulatedExecutor, VirtualClock, simulated_token
from legato.kv.manager import KVCacheManager
from legato.scheduler.scheduler import Scheduler
from legato.speculation.drafter import Drafter
from tests.engine.faulty_executor import FaultyExecutor, FindFault, little_memory, poison, poisoned
from tests.scheduler.drafters import RandomDrafter

NUM_TOKENS = 5


class Engine(EngineLoop):
    """Attributes: `executor`: the one it runs on.

    Args:
        settings: further fields of `SchedulerConfig`.
    """

    def __init__(
        self,
        find_fault: FindFault = poison,
        budget: int = 512,
        *,
        depth: int = 1,
        fails_late: bool = False,
        drafters: Sequence[Drafter] = (),
        num_blocks: int = 400,
        **settings: Any,
    ) -> None:
        num_slots = settings.pop("num_slots", 0)
        kv = KVCacheManager(num_blocks, block_size=4, num_host_slots=num_slots)
        config = SchedulerConfig(max_num_batched_tokens=budget, **settings).resolve(400)
        scheduler = Scheduler(config, max_model_len=400, kv=kv, drafters=drafters)
        self.clock = VirtualClock()
        executor = SimulatedExecutor(self.clock, lambda _: 0.01, depth=depth)
        self.executor = FaultyExecutor(executor, find_fault, fails_late=fails_late)
        super().__init__(scheduler, kv, self.executor, self.clock)


def request(
    request_id: str, prompt_len: int, eos_token_ids: tuple[int, ...] = (), **params: Any
) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=token_array([sum(request_id.encode())])
        * prompt_len,  # shared with no other
        params=SamplingParams(**{"max_tokens": NUM_TOKENS, **params}),
        eos_token_ids=eos_token_ids,
    )


def drain(engine: EngineLoop) -> list[RequestOutput]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def reasons(outputs: list[RequestOutput]) -> dict[str, FinishReason]:
    """Key request id; fails where a request ends twice."""
    ends = [(o.request_id, o.finish_reason) for o in outputs if o.finish_reason is not None]
    assert len(dict(ends)) == len(ends)
    return dict(ends)


def tokens(outputs: list[RequestOutput], request_id: str) -> list[int]:
    return [token for o in outputs if o.request_id == request_id for token in o.new_token_ids]


def undisturbed(request_id: str, prompt_len: int) -> list[int]:
    return [simulated_token(request_id, prompt_len + i, 32_000) for i in range(NUM_TOKENS)]


@pytest.mark.parametrize("error", [ValueError("boom"), MemoryError("full")], ids=repr)
@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("fails_late", [False, True])
def test_no_request_ends_for_its_drafts(
    error: Exception, num_requests: int, fails_late: bool
) -> None:
    """One whose drafts cannot be computed is computed without them; of no memory, none are left."""
    num_failed = 0

    def find_fault(plan: StepPlan) -> Exception | None:
        nonlocal num_failed
        has_drafts = any(chunk.draft_token_ids for chunk in plan.chunks)
        num_failed += has_drafts
        return error if has_drafts else None

    drafter = RandomDrafter(coming, vocab_size=32_000)
    engine = Engine(find_fault, fails_late=fails_late, drafters=[drafter], speculative=3)
    names = "abc"[:num_requests]
    outputs = engine.step([request(name, 3) for name in names]) + drain(engine)
    assert reasons(outputs) == dict.fromkeys(names, FinishReason.LENGTH)
    assert all(tokens(outputs, name) == undisturbed(name, 3) for name in names)
    assert num_failed
    if isinstance(error, MemoryError):
        assert engine.stats.num_failed_steps == 1


def coming(request: Request, count: int) -> list[int]:
    first = request.num_tokens
    return [simulated_token(request.request_id, first + i, 32_000) for i in range(count)]


def test_a_failed_step_ends_those_to_blame_and_no_others() -> None:
    engine = Engine()
    names = ["a", "b", "poison", "c", "d", "poison too", "e"]
    outputs = engine.step([request(name, 8) for name in names])
    ended = [o for o in outputs if o.finish_reason is not None]
    assert [o.request_id for o in ended] == ["poison", "poison too"]
    assert {o.error for o in ended} == {"ValueError: boom"}
    outputs += drain(engine)
    for name in "abcde":
        assert tokens(outputs, name) == undisturbed(name, 8)
    assert engine.stats.num_failed_steps == 1
    assert engine.stats.kv_usage == 0.0


def test_streams_advance_in_the_step_that_fails() -> None:
    engine = Engine()
    engine.step([request("a", 8), request("b", 8)])
    outputs = engine.step([request("poison", 8)])
    assert len(tokens(outputs, "a")) == len(tokens(outputs, "b")) == 1


@pytest.mark.parametrize("budget", [512, 100])
def test_chunks_that_find_no_memory_are_planned_again_but_shorter(budget: int) -> None:
    engine = Engine(little_memory(40), budget)
    outputs = engine.step([request("a", 300), request("b", 20)]) + drain(engine)
    assert reasons(outputs) == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert tokens(outputs, "a") == undisturbed("a", 300)
    assert max(step.num_tokens for step in engine.executor.steps) <= 40
    # Halved as often as it must be, and not forgotten in the next step.
    assert engine.stats.num_failed_steps <= 4


def test_decodes_without_memory_are_computed_in_parts() -> None:
    engine = Engine(little_memory(2))
    names = "abcde"
    outputs = engine.step([request(name, 1) for name in names]) + drain(engine)
    assert all(tokens(outputs, name) == undisturbed(name, 1) for name in names)


def test_a_request_too_large_for_the_memory_ends_alone() -> None:
    engine = Engine(
        lambda plan: MemoryError("full") if any(chunk.end > 100 for chunk in plan.chunks) else None
    )
    outputs = engine.step([request("large", 200), request("small", 50)]) + drain(engine)
    assert reasons(outputs) == {"large": FinishReason.ERROR, "small": FinishReason.LENGTH}
    assert [o.error for o in outputs if o.error] == ["MemoryError: full"]


def test_an_engine_that_computes_nothing_says_so() -> None:
    engine = Engine()
    engine.step([request("a", 8), request("b", 8)])
    engine.executor.find_fault = lambda _: RuntimeError("no device")
    with pytest.raises(EngineFaultError, match="no device"):
        engine.step()
    assert not engine.has_work
    engine.executor.find_fault = poison
    outputs = engine.step([request("c", 8)]) + drain(engine)
    assert tokens(outputs, "c") == undisturbed("c", 8)


def test_requests_that_all_fail_are_not_the_engines_fault() -> None:
    engine = Engine()
    outputs = engine.step([request("poison 1", 8), request("poison 2", 8)])
    assert set(reasons(outputs).values()) == {FinishReason.ERROR}
    assert engine.executor.steps[-1].chunks[0].request_id == "canary"


@pytest.mark.parametrize("num_failures", [0, 1])
@pytest.mark.parametrize("depth", [1, 2])
def test_copies_that_find_no_memory_are_made_again(depth: int, num_failures: int) -> None:
    """Once each and in order, while the requests whose step it was go on."""
    engine = Engine(depth=depth, num_blocks=100, num_slots=200)
    for name in "abcd":
        engine.step([request(name, 150)])
        drain(engine)
    undisturbed_moves = list(engine.executor.moves)
    assert undisturbed_moves
    engine.executor.failures_of_moves = [MemoryError("full")] * num_failures
    outputs = engine.step([request("a", 150, max_tokens=9), request("e", 150)]) + drain(engine)
    assert set(reasons(outputs).values()) == {FinishReason.LENGTH}
    assert not engine.executor.failures_of_moves
    assert engine.stats.num_failed_steps == num_failures
    moved = engine.executor.moves[len(undisturbed_moves) :]
    assert any(not move.to_host for move in moved)
    assert moved == list(dict.fromkeys(moved))


def test_an_engine_that_cannot_copy_ends() -> None:
    engine = Engine(num_blocks=100, num_slots=200)
    for name in "abcd":
        engine.step([request(name, 150)])
        drain(engine)
    engine.executor.failures_of_moves = [MemoryError("full")] * 9
    with pytest.raises(EngineFaultError, match="full"):
        engine.step([request("a", 150)])
    assert not engine.has_work


LOST = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors")


@pytest.mark.parametrize("fails_late", [False, True])
@pytest.mark.parametrize("num_good_steps", [0, 1, 2])
def test_nothing_is_run_on_a_device_that_is_lost(num_good_steps: int, fails_late: bool) -> None:
    """Also where it is lost while the guilty of another fault are looked for."""
    num_steps = 0

    def find_fault(_: StepPlan) -> Exception | None:
        nonlocal num_steps
        num_steps += 1
        return ValueError("boom") if num_steps <= num_good_steps else LOST

    engine = Engine(find_fault, fails_late=fails_late)
    with pytest.raises(EngineFaultError, match="illegal memory access"):
        engine.step([request(str(i), 8) for i in range(8)])
    assert num_steps == num_good_steps + 1
    assert not engine.has_work


@example(lengths=[44, 24], poisons=set(), memory=16, budget=90, depth=2, fails_late=False)
@example(lengths=[19, 29, 90], poisons=set(), memory=22, budget=87, depth=3, fails_late=False)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    poisons=st.sets(st.integers(0, 11)),
    memory=st.integers(1, 80),
    budget=st.integers(1, 120),
    depth=st.integers(1, 3),
    fails_late=st.booleans(),
)
def test_faults_end_nobody_else_and_change_no_token(
    lengths: list[int], poisons: set[int], memory: int, budget: int, depth: int, fails_late: bool
) -> None:
    full = little_memory(memory)
    engine = Engine(
        lambda plan: poison(plan) or full(plan), budget, depth=depth, fails_late=fails_late
    )
    names = [f"poison {i}" if i in poisons else str(i) for i in range(len(lengths))]
    requests = [request(name, length) for name, length in zip(names, lengths, strict=True)]
    outputs = engine.step(requests) + drain(engine)
    ends = reasons(outputs)
    assert set(ends) == set(names)
    for name, length in zip(names, lengths, strict=True):
        if ends[name] is FinishReason.ERROR:
            # A chunk is not cut below 16 tokens.
            assert poisoned(name) or memory < min(16, length)
        else:
            assert tokens(outputs, name) == undisturbed(name, length)
    assert engine.stats.kv_usage == 0.0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_steps_are_in_flight_as_the_executor_takes(depth: int) -> None:
    """Planning ahead wastes no step, though who ends by its length is known only from that."""
    engine = Engine(depth=depth)
    outputs = engine.step([request("a", 8, max_tokens=20), request("b", 8, max_tokens=9)])
    outputs += drain(engine)
    assert engine.executor.most_in_flight == depth
    assert len(engine.executor.steps) == 20
    assert engine.clock() == pytest.approx(20 * 0.01)
    assert [len(tokens(outputs, name)) for name in "ab"] == [20, 9]


def test_what_is_in_flight_behind_an_end_of_sequence_is_dropped() -> None:
    engine = Engine(depth=3)
    third = simulated_token("a", 10, 32_000)
    outputs = engine.step([request("a", 8, (third,), max_tokens=20)]) + drain(engine)
    assert reasons(outputs) == {"a": FinishReason.STOP}
    assert tokens(outputs, "a") == [simulated_token("a", 8 + i, 32_000) for i in range(3)]
    assert engine.stats.kv_usage == 0.0


def test_a_request_that_needs_values_runs_one_step_at_a_time() -> None:
    engine = Engine(depth=2)
    engine.step([request("a", 8, logprobs=1)])
    drain(engine)
    assert engine.executor.most_in_flight == 1


def test_an_abort_ends_a_request_in_flight_once() -> None:
    engine = Engine(depth=2)
    outputs = engine.step([request("a", 8), request("b", 8)])
    outputs += engine.step([AbortRequest(request_id="a")]) + drain(engine)
    assert reasons(outputs) == {"a": FinishReason.ABORT, "b": FinishReason.LENGTH}
    later = [chunk.request_id for plan in engine.executor.steps[2:] for chunk in plan.chunks]
    assert set(later) == {"b"}, "nothing is planned for what was aborted"
    assert tokens(outputs, "b") == undisturbed("b", 8)


def test_other_settings_wait_until_nothing_is_in_flight() -> None:
    engine = Engine(depth=2, budget=8)
    engine.step([request("a", 64)])
    config = SchedulerConfig(max_num_batched_tokens=16).resolve(max_model_len=400)
    engine.reconfigure(config)
    drain(engine)
    sizes = [plan.num_tokens for plan in engine.executor.steps]
    assert sizes == [8, 8, 16, 16, 16] + [1] * (NUM_TOKENS - 1)


def test_other_settings_hold_for_what_comes_behind_them() -> None:
    engine = Engine()
    config = SchedulerConfig(max_waiting=0).resolve(max_model_len=400)
    engine.reconfigure(config)
    outputs = engine.step([request("a", 8)])
    assert reasons(outputs) == {"a": FinishReason.REFUSED}


def test_stats_follow_the_work() -> None:
    engine = Engine(budget=8)
    engine.step([request("a", 20), request("b", 20)])
    assert (engine.stats.num_running, engine.stats.num_waiting) == (1, 1)
    assert 0.0 < engine.stats.kv_usage < 1.0
    drain(engine)
    assert (engine.stats.num_running, engine.stats.num_waiting) == (0, 0)


class FailingOnce(SimulatedExecutor):
    """Fails to collect one step, and to submit the one behind it, if `fails` says so.

    It computes only requests that were introduced to it.
    """

    fails: Sequence[str] = ()

    def submit(self, plan: StepPlan) -> None:
        if "submit" in self.fails:
            self.fails = ["collect"]
            raise RuntimeError("before it took the plan")
        known = self.__dict__.setdefault("known", set())
        known.difference_update(plan.ended_requests)
        known.update(request.request_id for request in plan.new_requests)
        assert known.issuperset(chunk.request_id for chunk in plan.chunks)
        super().submit(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        if "collect" in self.fails:
            self.fails = ()
            self._submitted.clear()
            raise RuntimeError("transient")
        return result


@pytest.mark.parametrize("fails", [["submit", "collect"], ["collect"]])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_request_whose_first_step_is_withdrawn_is_introduced_again(
    fails: list[str], *, is_aborted: bool
) -> None:
    """Whether the executor has heard of it or not; and it forgets what it may have heard of."""
    engine = Engine(lambda _: None, depth=2)
    engine._executor = executor = FailingOnce(engine.clock, lambda _: 0.01, depth=2)
    outputs = engine.step([request(name, 8, max_tokens=20) for name in ("a", "d")])
    outputs += engine.step()
    executor.fails = fails
    outputs += engine.step([request("b", 30)])
    if is_aborted:
        outputs += engine.step([AbortRequest(request_id="b")])
    outputs += drain(engine)
    assert not executor.fails
    end = FinishReason.ABORT if is_aborted else FinishReason.LENGTH
    assert reasons(outputs) == dict.fromkeys("ad", FinishReason.LENGTH) | {"b": end}
    if not is_aborted:
        assert tokens(outputs, "b") == undisturbed("b", 30)
    outputs += engine.step([request("c", 8)]) + drain(engine)
    assert executor.known == {"c"}  # type: ignore[attr-defined]
    assert engine.stats.kv_usage == 0.0
