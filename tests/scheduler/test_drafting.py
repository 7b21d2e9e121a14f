"""A step holds the best drafts that fit, so that no token is late."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from legato.core.plan import StepPlan
from legato.core.request import Request
from legato.core.step_record import DrafterName
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from legato.speculation.drafter import Draft
from tests.profiles import examples
from tests.scheduler.harness import VOCAB_SIZE, Harness, greedy_token
from tests.scheduler.step_times import step_shape, truth

HOPELESS = 0.02
"""Chance of coming below which a draft is not looked at."""
LIKELY = 0.5
"""From which on a draft that seems to cost too much is tried now and then."""
FLAT = (1e-4,) * 5
CHEAP = StepCosts(step_s=0.02, row_s=FLAT, draft_row_s=1e-5)
"""A row costs little beside a step, as where that waits for memory."""


class Scripted:
    """Proposes by request; key its id, value the chances. What it proposes is wrong."""

    def __init__(self, name: DrafterName = "model") -> None:
        self.name = name
        self.chances: Mapping[str, Sequence[float]] = {}
        self.most_asked: dict[str, int] = {}

    def advance(self, request: Request) -> None:
        """It knows already."""

    def propose(self, request: Request, most: int) -> Draft | None:
        self.most_asked[request.request_id] = most
        chances = self.chances.get(request.request_id, ())[:most]
        wrong = (greedy_token(list(request.token_ids)) + 1) % VOCAB_SIZE
        return Draft(self.name, [wrong] * len(chances), chances) if chances else None

    def forget(self, request: Request) -> None:
        """It keeps nothing."""


def measured(costs: StepCosts) -> list[MeasuredStep]:
    shapes = []
    for num_decodes, context, count, chunk in itertools.product(
        (1, 3, 40), (1, 200), (0, 1, 12), (0, 20, 300)
    ):
        shape = step_shape(num_decodes=num_decodes, context=context, chunk=chunk, start=context)
        for _ in range(num_decodes):
            shape.add_drafts(context, count)
        shapes.append(shape)
    return [(shape, costs.seconds(shape)) for shape in shapes]


class Streams:
    """Streams whose next step may have drafts.

    Args:
        prompt_lens: of each; they are called "0", "1" and so on.
        is_known: whether it is known what steps take.
    """

    def __init__(
        self,
        prompt_lens: Sequence[int],
        *,
        costs: StepCosts = CHEAP,
        is_known: bool = True,
        max_tokens: int = 60,
        drafters: Sequence[Scripted] | None = None,
        **settings: Any,
    ) -> None:
        self.drafters = drafters or [Scripted()]
        self.model = StepTimeModel(measured(costs) if is_known else ())
        usual: dict[str, Any] = {"budget": 512, "max_num_seqs": 64, "num_blocks": 2000}
        self.harness = Harness(
            step_time=self.model,
            step_time_s=truth(costs, lambda: 1.0),
            max_model_len=512,
            drafters=self.drafters,
            **{**usual, **settings},
        )
        for i, prompt_len in enumerate(prompt_lens):
            self.harness.add(str(i), prompt_len, max_tokens)
        while not all(self.harness.tokens.values()):
            assert self.harness.step() is not None

    def plan(self, chances: Mapping[str, Sequence[float]]) -> StepPlan:
        self.drafters[0].chances = chances
        plan = self.harness.plan()
        assert plan is not None
        return plan


def counts(plan: StepPlan) -> Counter[str]:
    """Drafts by request."""
    return Counter({c.request_id: len(c.draft_token_ids) for c in plan.chunks if c.draft_token_ids})


def without_drafts(plan: StepPlan) -> StepShape:
    shape = StepShape()
    for chunk in plan.chunks:
        shape.add(chunk.without_drafts if chunk.draft_token_ids else chunk)
    return shape


class Prefix:
    """The likeliest drafts, so many of them."""

    def __init__(
        self, plan: StepPlan, chances: Mapping[str, Sequence[float]], most: int, count: int
    ) -> None:
        starts = {chunk.request_id: chunk.start for chunk in plan.chunks}
        rows = [
            (-survival, list(starts).index(name), name)
            for name in chances
            for survival in itertools.accumulate(chances[name][:most], lambda a, b: a * b)
            if survival > HOPELESS
        ]
        self.num_rows = len(rows)
        self.rows = sorted(rows, key=lambda row: row[:2])[:count]
        self.counts = Counter(name for _, _, name in self.rows)
        self.expected: dict[str, float] = {}
        for chance, _, name in self.rows:
            self.expected[name] = self.expected.get(name, 0.0) - chance
        self.shape = without_drafts(plan)
        self.num_expected = self.shape.num_tokens - sum(row[0] for row in self.rows)
        for name, num_drafts in self.counts.items():
            self.shape.add_drafts(starts[name] + 1, num_drafts)


chances_of_three = st.fixed_dictionaries(
    {
        name: st.lists(st.floats(0.05, 0.99) | st.just(0.9), max_size=6, min_size=1)
        for name in ("0", "1", "2")
    }
)


@given(
    chances=chances_of_three,
    row_s=st.sampled_from([1e-5, 1e-3, 5e-3, 2e-2]),
    draft_row_s=st.sampled_from([0.0, 1e-4, 5e-3]),
    key_s=st.sampled_from([0.0, 1e-5, 2e-4]),
    itl_slo_s=st.sampled_from([None, 0.5, 0.06, 0.04]),
    budget=st.sampled_from([512, 64, 8, 4]),
    prompt_len=st.sampled_from([0, 0, 5, 200]),
)
@examples(25)
def test_it_takes_the_best_of_those_that_fit(
    chances: dict[str, list[float]],
    row_s: float,
    draft_row_s: float,
    key_s: float,
    itl_slo_s: float | None,
    budget: int,
    prompt_len: int,
) -> None:
    """It takes as many of the likeliest that fit as give most tokens a second, if these are 3 %
    more than without drafts, and no stream's time per token grows by more than 5 %."""
    costs = StepCosts(
        step_s=0.02, row_s=(row_s,) * 5, draft_row_s=draft_row_s, draft_context_s=key_s
    )
    streams = Streams([20, 40, 9], costs=costs, budget=budget, itl_slo_s=itl_slo_s, max_tokens=200)
    if prompt_len:
        streams.harness.add("prompt", prompt_len)
    plan, model = streams.plan(chances), streams.model
    # Where the promise lets fewer run at once, the first have ended.
    assume(chances.keys() <= {chunk.request_id for chunk in plan.chunks})
    prefixes = [Prefix(plan, chances, 6, count) for count in range(19)]
    num_rows = prefixes[0].num_rows
    most = min(num_rows, model.most_drafts)
    limit_s = float("inf") if plan.limit_s is None else plan.limit_s

    def is_late(prefix: Prefix) -> bool:
        return model.seconds(prefix.shape) * model.safety_factor(limit_s) > limit_s

    def is_over(prefix: Prefix) -> bool:
        return prefix.shape.num_tokens > budget

    def slows_a_stream(prefix: Prefix) -> bool:
        fewest = min(prefix.expected.get(name, 0.0) for name in ("0", "1", "2"))
        without_s = model.seconds(prefixes[0].shape)
        return model.seconds(prefix.shape) / without_s > 1.05 * (1.0 + fewest)

    fitting = next(
        (n - 1 for n in range(1, most + 1) if is_late(prefixes[n]) or is_over(prefixes[n])), most
    )
    rates = [
        0.0 if slows_a_stream(p) else p.num_expected / model.seconds(p.shape)
        for p in prefixes[: fitting + 1]
    ]
    best = rates.index(max(rates)) if max(rates) > 1.03 * rates[0] else 0
    count = counts(plan).total()
    assert counts(plan) == prefixes[count].counts
    if best == 0 and count == 1:
        assert -prefixes[1].rows[0][0] >= LIKELY, "tried once more, to see what it costs"
        return
    assert plan.predicted_s == pytest.approx(model.seconds(prefixes[count].shape))
    assert plan.drafts_s == pytest.approx(plan.predicted_s - model.seconds(prefixes[0].shape))
    if count != best:
        assert rates[count] == pytest.approx(rates[best], rel=1e-9), "only where both are best"
        return
    if best == fitting < most:
        reasons = ["time_budget"] * is_late(prefixes[best + 1])
        reasons += ["token_budget"] * is_over(prefixes[best + 1])
    else:
        reasons = ["proposals" if best == num_rows else "worth"]
    assert plan.drafts_ended_by in reasons


@pytest.mark.parametrize("slack", [0.0, 0.05, 0.5, math.inf])
def test_a_stream_that_copies_slows_no_other_stream_by_more_than_the_slack(slack: float) -> None:
    costs = StepCosts(step_s=0.02, row_s=(1e-3,) * 5)
    streams = Streams([20] * 4, costs=costs, speculative_slack=slack, max_tokens=200)
    plan = streams.plan({"0": [0.95] * 16})
    assert plan.predicted_s is not None
    assert plan.drafts_s is not None
    num_drafts = counts(plan).total()
    without_s = plan.predicted_s - plan.drafts_s
    assert plan.predicted_s <= (1.0 + slack) * without_s + 1e-9
    assert num_drafts == {0.0: 0, 0.05: 1, 0.5: 11, math.inf: 12}[slack]


def test_streams_that_copy_alike_draft_alike_and_deep() -> None:
    costs = StepCosts(step_s=0.02, row_s=(1e-3,) * 5)
    streams = Streams([20] * 4, costs=costs, max_tokens=200)
    drafted = counts(streams.plan({name: [0.95] * 16 for name in "0123"}))
    assert max(drafted.values()) - min(drafted[name] for name in "0123") <= 1
    assert min(drafted.values()) >= 4


@given(
    context=st.integers(1, 300),
    key_s=st.sampled_from([1e-6, 1e-4, 1e-3]),
    slack=st.floats(1.0, 3.0),
)
@examples(25)
def test_a_step_with_drafts_ends_in_time_to_the_last_key(
    context: int, key_s: float, slack: float
) -> None:
    costs = StepCosts(step_s=0.02, row_s=FLAT, draft_context_s=key_s)
    streams = Streams([context], costs=costs, is_known=True, itl_slo_s=0.05 * slack, speculative=16)
    model = streams.model
    plan = streams.plan({"0": [0.99] * 16})
    assume(counts(plan))
    assert plan.limit_s is not None
    assert model.seconds(StepShape.of(plan)) * model.safety_factor(plan.limit_s) <= plan.limit_s


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("most", [1, 3, 16])
def test_a_fixed_number_is_drafted_whatever_it_brings(most: int, is_known: bool) -> None:
    dear = StepCosts(step_s=0.001, row_s=(0.05,) * 5)
    streams = Streams([5, 50], costs=dear, is_known=is_known, speculative=most)
    plan = streams.plan({"0": [0.9] * 20, "1": [0.9] * 2})
    assert counts(plan) == {"0": most, "1": min(most, 2)}
    assert plan.drafts_ended_by == "proposals"


def test_nothing_is_drafted_as_long_as_nothing_is_known_of_its_cost() -> None:
    assert not counts(Streams([5], is_known=False).plan({"0": [0.9] * 4}))
    promised = Streams([5], is_known=False, itl_slo_s=10.0, speculative=4)
    plan = promised.plan({"0": [0.9] * 4})
    assert not counts(plan)
    assert plan.drafts_ended_by == "time_budget"


def test_drafts_retreat_where_prompts_make_better_use_of_rows() -> None:
    """Beside 320 rows, the last before there is padding, a row more costs more than it brings."""
    costs = StepCosts(step_s=0.02, row_s=(1e-6, 1e-6, 1e-3, 1e-3, 1e-3))
    chances = {"0": [0.7] * 4}
    assert counts(Streams([20], costs=costs).plan(chances)) == {"0": 4}
    beside = Streams([20], costs=costs)
    beside.harness.add("prompt", 319)
    plan = beside.plan(chances)
    assert not counts(plan)
    assert plan.drafts_ended_by == "worth"


def test_the_drafter_is_heard_whose_drafts_bring_most() -> None:
    first, second = Scripted("own"), Scripted("recent")
    streams = Streams([5, 6], drafters=[first, second])
    first.chances = {"0": [0.9], "1": [0.9, 0.9]}
    second.chances = {"0": [0.5, 0.99, 0.99, 0.9], "1": [0.5, 0.5, 0.5]}
    plan = streams.plan(first.chances)
    assert {c.request_id: c.drafter for c in plan.chunks} == {"0": "recent", "1": "own"}
    assert counts(plan) == {"0": 4, "1": 2}


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 5, 9])
def test_no_more_is_drafted_than_may_come(max_tokens: int) -> None:
    """One token has come, and the next comes in any case."""
    streams = Streams([5], max_tokens=max_tokens)
    assert counts(streams.plan({"0": [0.95] * 20})).total() == max_tokens - 2


def test_among_many_each_has_fewer() -> None:
    for num_streams, most in ((1, 15), (6, 15), (12, 8), (60, 3)):
        streams = Streams([3] * num_streams)
        streams.plan({"0": [0.9]})
        assert set(streams.drafters[0].most_asked.values()) == {most}


def test_a_step_has_no_more_samples_than_it_may() -> None:
    streams = Streams([3] * 64, speculative=16, budget=4096)
    plan = streams.plan({str(i): [0.9] * 16 for i in range(64)})
    assert sum(chunk.num_samples for chunk in plan.chunks) == 64 + 64
    assert max(counts(plan).values()) == 1, "the likeliest first"


@pytest.mark.parametrize("speculative", ["auto", 4])
def test_where_too_many_run_already_there_are_no_drafts(speculative: str | int) -> None:
    """As with settings that let fewer run than do."""
    streams = Streams([3] * 80, speculative=speculative, max_num_seqs=80, itl_slo_s=60.0)
    streams.harness.reconfigure(max_num_seqs=4)
    plan = streams.plan({str(i): [0.9] * 4 for i in range(80)})
    assert len(plan.chunks) == 80
    assert not counts(plan)


def test_drafts_take_nobody_s_blocks() -> None:
    """Where there are too few for all of a request's, it has those for which it has blocks."""
    streams = Streams([6, 6], num_blocks=6, speculative=9, max_tokens=14, admission_optimism=1.0)
    plan = streams.plan({"0": [0.99] * 5, "1": [0.9] * 9})
    # Token 6 goes to a request's second block of 4. Of the two that are free, one takes the first.
    assert counts(plan) == {"0": 5, "1": 1}
    assert plan.drafts_ended_by == "memory"
    assert not plan.preempted
    assert streams.harness.kv.num_free_blocks == 1
    streams.harness.drain()
    for name in "01":
        assert streams.harness.tokens[name] == streams.harness.expected_tokens(name)


def test_after_memory_ran_out_there_are_no_drafts_for_a_while() -> None:
    streams = Streams([6], speculative=4)
    chances = {"0": [0.9] * 4}
    streams.harness.run(streams.plan(chances), out_of_memory=True)
    plan = streams.plan(chances)
    assert not counts(plan)
    assert plan.drafts_ended_by == "memory"
    streams.harness.run(plan)
    streams.harness.clock.advance_to(streams.harness.clock() + 60.0)
    assert counts(streams.plan(chances))


def test_drafts_of_a_step_that_is_withdrawn_leave_no_trace() -> None:
    streams = Streams([6], speculative=4, max_tokens=9)
    harness, chances = streams.harness, {"0": [0.9] * 4}
    first = streams.plan(chances)
    assert counts(first)
    harness.withdraw()
    assert streams.plan(chances).chunks == first.chunks
    harness.drain()
    assert harness.tokens["0"] == harness.expected_tokens("0")


def test_off_drafts_nothing() -> None:
    streams = Streams([6], speculative="off")
    plan = streams.plan({"0": [0.99] * 4})
    assert not counts(plan)
    assert plan.drafts_ended_by is None
    assert not streams.drafters[0].most_asked


@pytest.mark.parametrize("itl_slo_s", [None, 0.03])
def test_choosing_asks_for_each_row_s_time_a_few_times(
    itl_slo_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 64 streams, however few of the drafts are in time."""
    streams = Streams([3] * 64, itl_slo_s=itl_slo_s, max_tokens=100)
    num_asked, seconds = 0, StepTimeModel.seconds

    def counted(model: StepTimeModel, shape: StepShape) -> float:
        nonlocal num_asked
        num_asked += 1
        return seconds(model, shape)

    streams.plan({})
    streams.harness.run(streams.harness.in_flight[0])
    monkeypatch.setattr(StepTimeModel, "seconds", counted)
    streams.plan({})
    num_usual, num_asked = num_asked, 0
    streams.harness.run(streams.harness.in_flight[0])
    num_asked = 0
    streams.plan({str(i): [0.95, 0.9, 0.8] for i in range(64)})
    assert num_asked - num_usual <= 2 * 96 + 2
