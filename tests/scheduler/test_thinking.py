"""Thinking budgets: never a token over, and nothing else of the output changes."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from legato.core.sampling_params import ThinkingLimit
from tests.profiles import examples
from tests.scheduler.harness import VOCAB_SIZE
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
