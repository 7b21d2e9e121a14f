"""Thinking budgets: never a token over, and nothing else of the output changes."""

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from legato.core.outputs import FinishReason
from legato.core.request import AddRequest, Request
from legato.core.sampling_params import SamplingParams, ThinkingLimit
from legato.core.slo import SloClass
from legato.core.token_ids import token_array
from legato.kv.window_group import WindowGroup
from legato.kv.window_groups import WindowGroups
from legato.scheduler.thinking import given_logprobs
from tests.profiles import examples
from tests.scheduler.harness import VOCAB_SIZE, Harness
from tests.scheduler.test_invariants import SchedulerMachine
from tests.scheduler.thoughts import Thoughts

FORCED, AGAIN = (801, 802, 803, 804), (803, 804)


@st.composite
def limits(draw: st.DrawFn) -> ThinkingLimit:
    """Marks that a made-up model writes often."""
    budget = draw(st.sampled_from([0, 1, 2, 3, 5, 8, 40, None]))
    num_said = draw(st.sampled_from([0, 2])) if budget is not None and budget > 2 else 0
    return ThinkingLimit(
        budget=budget,
        begins=tuple((token_id,) for token_id in range(0, VOCAB_SIZE, 6)),
        ends=tuple(range(1, VOCAB_SIZE, 12)),
        forced=FORCED if num_said else AGAIN,
        num_said=num_said,
        forced_again=AGAIN,
        breaks=tuple(range(2, VOCAB_SIZE, 5)),
        is_open=budget != 0 and draw(st.booleans()),  # else the prompt ends the thought
    )


class ThinkingMachine(SchedulerMachine):
    """All that may happen to requests that have thinking budgets."""

    @initialize(limit=limits())
    def think(self, limit: ThinkingLimit) -> None:
        self.limit = limit
        if hasattr(self, "harness"):
            self.harness.thinking = limit

    def teardown(self) -> None:
        super().teardown()  # each output is as the one that runs alone
        if not hasattr(self, "harness"):
            return
        for request_id, tokens in self.harness.tokens.items():
            thoughts, budget, end = Thoughts(self.limit), self.limit.budget, 0
            while end < len(tokens):
                end += 1 + len(thoughts.after(tokens[: end + 1]))
            num_thought, _ = thoughts.read(tokens)
            assert budget is None or num_thought <= budget, request_id


TestThinking = ThinkingMachine.TestCase
TestThinking.settings = examples(160, stateful_step_count=40)


ONE = ThinkingLimit(
    budget=1, begins=((VOCAB_SIZE,),), ends=(803,), forced=FORCED, num_said=2, forced_again=AGAIN
)


@pytest.mark.parametrize(
    ("max_tokens", "stop", "min_tokens", "expected"),
    [
        (9, (), 0, (4, None)),
        (3, (), 0, (2, FinishReason.LENGTH)),
        (9, (803,), 0, (3, FinishReason.STOP)),
        (9, (803,), 8, (4, None)),
        (4, (803,), 0, (3, FinishReason.STOP)),
    ],
)
def test_given_tokens_end_a_request_as_sampled_ones_do(
    max_tokens: int, stop: tuple[int, ...], min_tokens: int, expected: tuple[int, FinishReason]
) -> None:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, min_tokens=min_tokens)
    message = AddRequest(request_id="a", prompt_token_ids=token_array([1, 2]), params=params)
    request = Request(message, SloClass(), 100)
    request.append(5, 0.0)
    assert (request.give(FORCED, 0), request.finish_reason) == expected
    assert request.stop_reason == (803 if expected[1] is FinishReason.STOP else None)
    assert request.num_tokens == len(request.token_ids) == 3 + expected[0]


def test_an_executor_gets_given_tokens_that_a_cache_has() -> None:
    """A preempted request finds all but the last computed, and the step with them is withdrawn."""
    limit = msgspec.structs.replace(ONE, is_open=True, num_said=0, budget=1)
    harness = Harness(num_blocks=64, block_size=1)
    harness.add("a", prompt=[1, 2, 3], max_tokens=9, thinking=limit)
    for _ in range(4):
        harness.step()
    harness.add("b", prompt=[1, 2, 3], max_tokens=9, thinking=limit)
    harness.step()
    scheduler = harness.scheduler
    request = scheduler._queues.running["b"]
    assert request.num_given_tokens == len(FORCED)
    harness.kv.release(request)
    request.preempt()
    scheduler._queues.preempt(request)
    harness.plan()
    harness.withdraw()
    harness.step()
    chunks = [chunk for chunk in harness.plans[-1].chunks if chunk.request_id == "b"]
    assert [chunk.num_tokens for chunk in chunks] == [1]
    assert [chunk.given and chunk.given.token_ids for chunk in chunks] == [FORCED]


@pytest.mark.parametrize(("asked", "num_top"), [(0, 0), (2, 1)])
def test_given_tokens_are_among_the_most_likely_only_if_asked_for(asked: int, num_top: int) -> None:
    params = SamplingParams(max_tokens=9, logprobs=asked)
    message = AddRequest(request_id="a", prompt_token_ids=token_array([1, 2]), params=params)
    logprobs = given_logprobs(Request(message, SloClass(), 100), (), 0, FORCED)
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == [*FORCED]
    assert {len(entry.top) for entry in logprobs} == {num_top}


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_given_tokens_are_computed_in_parts_that_windows_hold(enable_prefix_caching: bool) -> None:
    """A window group with no room for all of them at once preempted their stream again and again,
    for ever without a prefix cache.
    """
    forced = tuple(range(200))
    limit = msgspec.structs.replace(
        ONE, budget=203, ends=(999,), forced=forced, num_said=199, is_open=True
    )
    group = WindowGroup(4, 11, 4)
    harness = Harness(
        budget=16,
        max_model_len=256,
        windows=WindowGroups([group], block_size=4, max_requests=1),
        enable_prefix_caching=enable_prefix_caching,
    )
    for name in "ab":
        harness.add(name, 10, max_tokens=210, thinking=limit)
    harness.drain()
    assert [len(tokens) for tokens in harness.tokens.values()] == [210, 210]
    assert not any(plan.preempted for plan in harness.plans)
