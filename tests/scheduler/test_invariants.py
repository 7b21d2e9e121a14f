"""What must always hold (docs/architecture.md), under random traffic and too little memory."""

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from legato.core.outputs import FinishReason
from legato.core.plan import StepPlan
from legato.core.slo import SloClass
from legato.scheduler.order import ORDERS
from legato.scheduler.policy import POLICIES
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_time import StepTimeModel
from tests.kv.conservation import check_blocks
from tests.profiles import examples
from tests.scheduler.harness import Harness
from tests.scheduler.step_times import calibrate, noise_of, true_costs, truth

MAX_MODEL_LEN = 32


def seconds() -> st.SearchStrategy[float]:
    """Of a promise: from what no step can keep to what every step does."""
    return st.sampled_from([0.001, 0.02, 0.1, 0.3, 1.0, 5.0])


def slo_classes(*, has_pace: bool) -> st.SearchStrategy[SloClass]:
    if not has_pace:
        return st.builds(SloClass, ttft_s=st.none() | seconds())
    pace = st.builds(SloClass, itl_s=seconds(), ttft_s=st.none() | seconds())
    both = st.builds(SloClass, itl_s=st.none() | seconds(), tpot_s=seconds())
    return pace | both


@st.composite
def scheduler_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of `SchedulerConfig` that go together."""
    has_pace = draw(st.booleans())
    is_chunked = has_pace or draw(st.booleans())
    budget, max_num_seqs = draw(st.integers(1, 40)), draw(st.integers(1, 8))
    interactive = draw(slo_classes(has_pace=has_pace))
    other = draw(slo_classes(has_pace=has_pace))
    promises_ttft = interactive.ttft_s is not None or other.ttft_s is not None
    return {
        "policy": "stall-free" if has_pace else draw(st.sampled_from(sorted(POLICIES))),
        "enable_chunked_prefill": is_chunked,
        "budget": budget if is_chunked else MAX_MODEL_LEN + max_num_seqs + budget,
        "max_num_seqs": max_num_seqs,
        "prefill_order": draw(st.sampled_from([None, *ORDERS])),
        "itl_slo_s": interactive.itl_s,
        "tpot_slo_s": interactive.tpot_s,
        "ttft_slo_s": interactive.ttft_s,
        "slo_classes": {"other": other},
        "shed_load": promises_ttft and draw(st.booleans()),
        "admission_optimism": draw(st.sampled_from([0.5, 0.0, 1.0])),
    }


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    """Short ones and long ones that begin alike, up to anywhere."""
    lengths = st.integers(1, 6) | st.integers(1, MAX_MODEL_LEN - 1)
    return st.builds(
        lambda length, fork, tail: tuple(0 if i < fork else tail for i in range(length)),
        lengths,
        st.sampled_from([0, 4, 10, 16, MAX_MODEL_LEN]),
        st.integers(1, 3),
    )


def arrivals() -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of `Harness.add`."""
    return st.fixed_dictionaries(
        {
            "prompt": prompts(),
            "prompt_logprobs": st.sampled_from([None, None, None, 0]),
            "cache_salt": st.sampled_from([None, None, None, "a"]),
            "max_tokens": st.sampled_from([12, 20, 1, 2, 5]),
            "slo_class": st.sampled_from(["interactive", "batch", "other"]),
            "priority": st.integers(-3, 3),
            "allow_best_effort": st.booleans(),
        }
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        scheduler=scheduler_settings(),
        num_blocks=st.integers(8, 40),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        num_host_slots=st.sampled_from([0, 4, 40]),
        costs=true_costs(),
        is_calibrated=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def start(
        self,
        scheduler: dict[str, Any],
        num_blocks: int,
        enable_prefix_caching: bool,
        num_host_slots: int,
        costs: StepCosts,
        is_calibrated: bool,
        seed: int,
    ) -> None:
        self.harness = Harness(
            num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            num_host_slots=num_host_slots,
            block_size=4,
            max_model_len=MAX_MODEL_LEN,
            max_waiting=12,
            step_time=StepTimeModel(calibrate(costs, MAX_MODEL_LEN) if is_calibrated else ()),
            step_time_s=truth(costs, noise_of(seed)),
            **scheduler,
        )
        self.ids = map(str, itertools.count())
        self.in_flight: StepPlan | None = None

    @rule(arrivals=st.lists(arrivals(), min_size=1, max_size=6))
    def add(self, arrivals: list[dict[str, Any]]) -> None:
        for arrival in arrivals:
            self.harness.add(next(self.ids), **arrival)

    @rule(data=st.data(), arrival=arrivals())
    def continue_conversation(self, data: st.DataObject, arrival: dict[str, Any]) -> None:
        """A prompt that begins with another one and what has come of it."""
        if self.harness.added:
            past = self.harness.token_ids(data.draw(st.sampled_from(sorted(self.harness.added))))
            prompt = (*past, *arrival["prompt"])[: MAX_MODEL_LEN - 1]
            self.harness.add(next(self.ids), **{**arrival, "prompt": prompt})

    @rule(seconds=st.floats(0.01, 30.0))
    def wait(self, seconds: float) -> None:
        self.harness.clock.advance_to(self.harness.clock() + seconds)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.harness.added:
            self.harness.abort(data.draw(st.sampled_from(sorted(self.harness.added))))

    @precondition(lambda self: self.in_flight is None)
    @rule(scheduler=scheduler_settings())
    def reconfigure(self, scheduler: dict[str, Any]) -> None:
        self.harness.reconfigure(max_num_batched_tokens=scheduler.pop("budget"), **scheduler)

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def plan(self) -> None:
        had_work = self.harness.scheduler.has_work
        self.in_flight = self.harness.plan()
        assert (self.in_flight is not None) == had_work, "work must always lead to a step"

    @precondition(lambda self: self.in_flight is not None)
    @rule(
        fails=st.integers(0, 9).map(lambda n: n == 9),
        out_of_memory=st.booleans(),
        data=st.data(),
    )
    def land(self, fails: bool, out_of_memory: bool, data: st.DataObject) -> None:
        assert self.in_flight is not None
        ids = [chunk.request_id for chunk in self.in_flight.chunks]
        failing = data.draw(st.sets(st.sampled_from(ids))) if fails else ()
        self.harness.run(self.in_flight, failing, out_of_memory=fails and out_of_memory)
        self.in_flight = None

    @precondition(lambda self: self.in_flight is None)
    @rule(num_steps=st.integers(1, 12))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.plan()
            if self.in_flight is not None:
                self.harness.run(self.in_flight)
                self.in_flight = None

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "harness"):
            return
        kv = self.harness.kv
        check_blocks(kv)
        if self.in_flight is not None:
            held = {block for table in kv._tables.values() for block in table.block_ids}
            flying = {block for chunk in self.in_flight.chunks for block in chunk.block_ids}
            assert flying <= held, "a block was freed under a step in flight"

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        if self.in_flight is not None:
            self.harness.run(self.in_flight)
        self.harness.drain()
        harness = self.harness
        assert harness.kv.num_free_blocks == harness.kv.num_blocks
        assert harness.known <= set(harness.scheduler._ended), "the executor keeps what has ended"
        for request_id in harness.added:
            reasons = harness.finish_reasons[request_id]
            harness.check_skipped(request_id)
            assert len(reasons) == 1, "each request ends exactly once"
            expected = harness.expected_tokens(request_id)
            if reasons == [FinishReason.LENGTH]:
                assert harness.tokens[request_id] == expected
            else:
                assert harness.tokens[request_id] == expected[: len(harness.tokens[request_id])]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = examples(150, stateful_step_count=60)


@given(prompt_len=st.integers(1, 500), budget=st.integers(1, 130))
def test_a_prompt_alone_takes_ceil_l_over_c_steps(prompt_len: int, budget: int) -> None:
    harness = Harness(budget=budget, num_blocks=200, max_model_len=512)
    harness.add("a", prompt_len, max_tokens=1)
    harness.drain()
    assert len(harness.plans) == -(-prompt_len // budget)
    assert harness.tokens["a"] == harness.expected_tokens("a")


@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=12),
    budget=st.integers(1, 64),
    num_blocks=st.integers(20, 60),
    policy=st.sampled_from(["stall-free", "prefill-first"]),
)
def test_the_schedule_does_not_show_in_the_tokens(
    lengths: list[tuple[int, int]], budget: int, num_blocks: int, policy: str
) -> None:
    harness = Harness(
        budget=budget, num_blocks=num_blocks, max_model_len=80, policy=policy, max_num_seqs=12
    )
    for i, (prompt_len, max_tokens) in enumerate(lengths):
        harness.add(str(i), prompt_len, max_tokens)
    harness.drain()
    for request_id in harness.added:
        assert harness.tokens[request_id] == harness.expected_tokens(request_id)
