"""What must always hold (docs/architecture.md), under random traffic and too little memory."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from legato.core.outputs import FinishReason
from legato.core.plan import StepPlan
from tests.scheduler.harness import Harness


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["stall-free", "prefill-first"]),
        chunked=st.booleans(),
        budget=st.integers(1, 40),
        max_num_seqs=st.integers(1, 6),
        num_blocks=st.integers(8, 24),
    )
    def start(
        self, policy: str, chunked: bool, budget: int, max_num_seqs: int, num_blocks: int
    ) -> None:
        self.harness = Harness(
            policy=policy,
            enable_chunked_prefill=chunked,
            budget=budget if chunked else 32 + max_num_seqs + budget,
            max_num_seqs=max_num_seqs,
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=32,
            max_waiting=6,
        )
        self.ids = map(str, itertools.count())
        self.in_flight: StepPlan | None = None

    @rule(prompt_len=st.integers(1, 31), max_tokens=st.integers(1, 12))
    def add(self, prompt_len: int, max_tokens: int) -> None:
        self.harness.add(next(self.ids), prompt_len, max_tokens)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.harness.added:
            self.harness.abort(data.draw(st.sampled_from(sorted(self.harness.added))))

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def plan(self) -> None:
        had_work = self.harness.scheduler.has_work
        self.in_flight = self.harness.plan()
        assert (self.in_flight is not None) == had_work, "work must always lead to a step"

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def commit(self) -> None:
        assert self.in_flight is not None
        self.harness.run(self.in_flight)
        self.in_flight = None

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def crash(self) -> None:
        assert self.in_flight is not None
        self.harness.take(self.harness.scheduler.fail(self.in_flight, "boom"))
        self.in_flight = None

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "harness"):
            return
        kv = self.harness.kv
        held = [block for table in kv._tables.values() for block in table]
        assert len(held) == len(set(held)), "a block has two owners"
        assert len(held) + kv.num_free_blocks == kv.num_blocks
        if self.in_flight is not None:
            flying = {block for chunk in self.in_flight.chunks for block in chunk.block_ids}
            assert flying <= set(held), "a block was freed under a step in flight"

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        if self.in_flight is not None:
            self.harness.run(self.in_flight)
        self.harness.drain()
        harness = self.harness
        assert harness.kv.num_free_blocks == harness.kv.num_blocks
        for request_id in harness.added:
            reasons = harness.finish_reasons[request_id]
            assert len(reasons) == 1, "each request ends exactly once"
            expected = harness.expected_tokens(request_id)
            if reasons == [FinishReason.LENGTH]:
                assert harness.tokens[request_id] == expected
            else:
                assert harness.tokens[request_id] == expected[: len(harness.tokens[request_id])]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


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
@settings(deadline=None)
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


def test_planning_does_not_look_at_the_whole_queue() -> None:
    """Counts the waiting requests that a plan touches, with 10 and with 10,000 of them."""

    def touched(num_waiting: int) -> int:
        harness = Harness(budget=8, max_num_seqs=4, max_waiting=20_000)
        for i in range(num_waiting):
            harness.add(str(i), 6)
        queues = harness.scheduler._queues
        count = 0
        original = queues.next_waiting

        def counting() -> object:
            nonlocal count
            count += 1
            return original()

        queues.next_waiting = counting  # type: ignore[method-assign,assignment]
        for _ in range(10):
            harness.step()
        return count

    assert touched(10_000) <= touched(50)
