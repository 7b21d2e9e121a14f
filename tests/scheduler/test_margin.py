"""How the margin follows the errors of steps."""

import math
import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.request import Request
from legato.core.slo import SloClass
from legato.scheduler.margin import (
    LARGEST_FACTOR,
    Deadlines,
    Margin,
    Tails,
    allowed_miss_rate,
)
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from tests.profiles import examples
from tests.scheduler.harness import Harness
from tests.scheduler.requests import waiting_request
from tests.scheduler.step_times import calibrate

LIMIT_S = 0.12
MANY = 0.1
"""The share of gaps that may be late in a stream of many gaps (`allowed_miss_rate`)."""


class Phase(NamedTuple):
    """A machine for some steps: interruptions a second of steps, their longest, and its noise."""

    num_steps: int
    rate: float = 0.0
    longest_s: float = 0.0
    noise: float = 0.03


def serve(margin: Margin, phase: Phase, seed: int = 0, limit_s: float = LIMIT_S) -> int:
    """Plan and observe the longest steps that the margin allows; return how many were late."""
    rng, num_late = random.Random(seed), 0
    for _ in range(phase.num_steps):
        predicted_s = limit_s / margin.factor(limit_s)
        taken_s = predicted_s * (1.0 + phase.noise * rng.uniform(-1.0, 1.0))
        if rng.random() < phase.rate * predicted_s:
            taken_s += phase.longest_s * rng.uniform(0.5, 1.0)
        num_late += taken_s > limit_s
        margin.observe(predicted_s, taken_s, limit_s, is_mixed=True)
    return num_late


def margin_for(quantile: float = 0.99, share: float = MANY) -> Margin:
    margin = Margin()
    margin.set_miss_rate(share * (1.0 - quantile))
    return margin


def phases() -> st.SearchStrategy[list[Phase]]:
    phase = st.builds(
        Phase, st.integers(1, 800), st.floats(0.0, 3.0), st.floats(0.0, 0.05), st.floats(0.0, 0.2)
    )
    return st.lists(phase, min_size=1, max_size=8)


@given(phases=phases(), quantile=st.sampled_from([0.9, 0.99, 0.999]), seed=st.integers(0, 99))
@examples(60)
def test_few_steps_are_late_whatever_the_machine_does(
    phases: list[Phase], quantile: float, seed: int
) -> None:
    margin = margin_for(quantile)
    num_late = sum(serve(margin, phase, seed) for phase in phases)
    num_steps = sum(phase.num_steps for phase in phases)
    # What is promised, and a few steps whenever the machine becomes worse than it ever was.
    assert num_late <= (1.0 - quantile) * num_steps + 4 * len(phases) + 4


def test_an_undisturbed_machine_uses_most_of_the_promise_from_the_first_step_on() -> None:
    margin = margin_for()
    assert margin.factor(LIMIT_S) < 1.2
    assert serve(margin, Phase(3000)) <= 6
    assert margin.factor(LIMIT_S) < 1.12


def test_interruptions_are_learned_from_steps_of_all_lengths() -> None:
    margin = Margin()
    for number in range(2000):
        margin.observe(0.01, 0.05 if number % 200 == 0 else 0.01, None, is_mixed=False)
    assert margin.factor(LIMIT_S) >= LIMIT_S / 0.08
    assert serve(margin, Phase(2000, rate=0.5, longest_s=0.04)) <= 2


def test_an_interruption_is_a_smaller_share_of_a_longer_promise() -> None:
    margin = Margin()
    serve(margin, Phase(2000, rate=0.5, longest_s=0.04))
    assert margin.factor(LIMIT_S) > 1.4
    assert margin.factor(10 * LIMIT_S) < 1.2


def test_quiet_gives_back_what_interruptions_took() -> None:
    margin = Margin()
    serve(margin, Phase(1000, rate=1.0, longest_s=0.05))
    assert margin.factor(LIMIT_S) > 1.5
    serve(margin, Phase(5000))
    assert margin.factor(LIMIT_S) < 1.2


def test_a_higher_quantile_misses_less() -> None:
    late = [
        serve(margin_for(quantile), Phase(20_000, rate=0.1, longest_s=0.05, noise=0.1))
        for quantile in (0.9, 0.99, 0.999)
    ]
    assert late[0] > 3 * late[1] > 3 * late[2]


def test_what_no_margin_covers_is_not_counted() -> None:
    margin, rng = Margin(), random.Random(0)
    for _ in range(2000):
        margin.observe(0.1, 0.6 if rng.random() < 0.02 else 0.1, LIMIT_S, is_mixed=True)
    assert margin.factor(LIMIT_S) < 1.2


def test_a_rare_long_interruption_takes_less_room_than_frequent_ones() -> None:
    def factor(num_interruptions: int) -> float:
        serve(margin := Margin(), Phase(3000))
        for _ in range(num_interruptions):
            margin.observe(0.1, 0.155, None, is_mixed=True)
        return margin.factor(LIMIT_S)

    assert factor(0) < 1.3
    assert 1.5 < factor(1) < 1.65
    assert 1.8 < factor(30) <= 2.0


def test_a_margin_that_keeps_prefill_out_is_forgotten() -> None:
    margin = Margin()
    for _ in range(1000):
        margin.observe(0.05, 0.095, LIMIT_S, is_mixed=True)
    assert margin.factor(LIMIT_S) > 1.8
    for _ in range(7000):
        margin.expire()
        margin.observe(0.05, 0.05, LIMIT_S, is_mixed=False)
    assert margin.factor(LIMIT_S) < 1.2


@pytest.mark.parametrize("quantile", [0.9, 0.999])
def test_another_quantile_goes_by_the_same_errors(quantile: float) -> None:
    margin = Margin()
    serve(margin, Phase(1000, rate=5.0, longest_s=0.05))
    margin.set_miss_rate(MANY * (1.0 - quantile))
    assert margin.factor(LIMIT_S) >= 1.2


def test_a_later_run_knows_what_an_earlier_one_learned() -> None:
    margin, rng = Margin(), random.Random(0)
    for number in range(1000):
        taken_s = 0.1 + (0.04 if number % 50 == 0 else 0.01 * rng.random())
        margin.observe(0.1, taken_s, None, is_mixed=True)
    again = Margin(margin.tails)
    for limit_s in (0.03, LIMIT_S, 1.0):
        assert again.factor(limit_s) == pytest.approx(margin.factor(limit_s), rel=0.05)


ANY = st.sampled_from([0.0, -0.0, 5e-324, 1e-300, 1e300, -1.0, math.inf, -math.inf, math.nan])
"""Numbers that a clock or a division may yield; `st.floats` alone seldom has them."""
ANY |= st.floats()


@given(
    steps=st.lists(st.tuples(ANY, ANY, st.none() | ANY, st.booleans()), max_size=40),
    tails=st.builds(Tails, body=st.tuples(ANY), watched_s=ANY, interruptions_s=st.tuples(ANY)),
    limit_s=ANY,
)
@examples(200)
def test_no_number_unbounds_a_margin(
    steps: list[tuple[float, float, float | None, bool]], tails: Tails, limit_s: float
) -> None:
    margin, deadlines = Margin(tails), Deadlines()
    for predicted_s, taken_s, allowed_s, is_mixed in steps:
        margin.observe(predicted_s, taken_s, allowed_s, is_mixed=is_mixed)
        for _ in range(20):
            deadlines.observe(taken_s, limit_s, predicted_s, taken_s)
    for _ in range(2):
        assert 1.0 <= margin.factor(limit_s) <= LARGEST_FACTOR
        assert 1.0 <= margin.factor(LIMIT_S) <= LARGEST_FACTOR
        learned = margin.tails
        numbers = (*learned.body, learned.watched_s, *learned.interruptions_s)
        assert all(map(math.isfinite, numbers))
        margin = Margin(learned)
    assert 0.0 <= deadlines.guard_s(limit_s) < math.inf
    assert 0.0 < deadlines.guard_s(LIMIT_S) <= 0.25 * LIMIT_S
    assert 0.0 <= deadlines.shortening <= 0.5


COSTS = StepCosts(step_s=0.01, row_s=(1e-4,) * 5, decode_row_s=1e-3, chunk_s=0.02)
WIDE = Tails(body=(0.8,) * 256, watched_s=300.0)
"""Of a machine on which steps with prefill took 1.8 times their prediction."""


def margin_after(num_streams: int, *, kv_role: str | None = None) -> float:
    """Return the margin after 600 steps of streams, beside which a prompt waits."""
    model = StepTimeModel(calibrate(COSTS, 4000), tails=WIDE)
    harness = Harness(
        budget=2048,
        max_num_seqs=64,
        num_blocks=9000,
        block_size=32,
        max_model_len=4096,
        step_time=model,
        step_time_s=lambda plan: COSTS.seconds(StepShape.of(plan)),
        itl_slo_s=0.1,
    )
    for i in range(num_streams):
        harness.add(f"stream {i}", 10, 3000)
    while harness.scheduler.stats.num_waiting:
        harness.step()
        model._margin = Margin(WIDE)
    harness.add("prompt", 1000, 3000, kv_role=kv_role)
    for _ in range(600):
        harness.step()
        assert harness.plans[-1].num_tokens == num_streams or not kv_role
    return model.margin_at(0.1)


def test_a_margin_is_forgotten_while_it_keeps_a_prompt_out() -> None:
    assert margin_after(23) < 0.7


def test_a_margin_stays_while_a_prompt_waits_for_blocks() -> None:
    """Steps without prefill say nothing about it."""
    for num_streams in (2, 20):
        assert margin_after(num_streams, kv_role="fetch") == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("limit_s", "is_forgotten"),
    [(0.05, True), (0.02, False), (0.09, False), (0.0, False), (-1.0, False), (math.inf, False)],
)
@pytest.mark.parametrize("drops_rows", [True, False])
def test_a_margin_is_forgotten_where_it_alone_keeps_work_out(
    limit_s: float, is_forgotten: bool, drops_rows: bool
) -> None:
    """Not where work is late without it, too, nor where there is room, nor without a limit."""
    model = StepTimeModel(calibrate(COSTS, 4000), tails=WIDE, drops_rows=drops_rows)
    shape = StepShape()
    shape.add_decode(100)
    shape.add_prefill(0, 1, samples=1)
    assert 0.03 < model.seconds(shape) < 0.04
    for _ in range(300):
        model.decay_margin(shape, limit_s)
    assert (model.margin_at(LIMIT_S) < 0.3) is is_forgotten


def test_streams_of_few_gaps_bear_less() -> None:
    """One late gap of less than a hundred breaks the promise of 99 in 100, one of more may not."""
    few, many = (streaming(num_output) for num_output in (99, 100))
    stricter = streaming(100, quantile=0.999)
    assert miss_rate([few, many]) == miss_rate([few]) < miss_rate([many])
    assert miss_rate([many, stricter]) == miss_rate([few, many, stricter]) < miss_rate([many])
    best_effort, prompt = streaming(2, itl_s=None), streaming(0)
    assert miss_rate([many, best_effort, prompt]) == miss_rate([many])
    serve(margin := Margin(), Phase(3000, rate=0.03, longest_s=0.05))
    strict = margin.factor(LIMIT_S)
    margin.set_miss_rate(miss_rate([many]))
    assert margin.factor(LIMIT_S) < strict


def test_no_stream_is_asked_after_the_strictest() -> None:
    few, many = (streaming(num_output) for num_output in (99, 100))
    rest = iter([many, few, many, many])
    allowed_miss_rate(rest, [few.slo, SloClass()])
    assert len([*rest]) == 2
    assert allowed_miss_rate([], []) == miss_rate([few])


def miss_rate(requests: list[Request]) -> float:
    return allowed_miss_rate(requests, [request.slo for request in requests])


def streaming(num_output: int, quantile: float = 0.99, itl_s: float | None = LIMIT_S) -> Request:
    slo = SloClass() if itl_s is None else SloClass(itl_s=itl_s, itl_quantile=quantile)
    request = waiting_request(slo=slo)
    for _ in range(num_output):
        request.append(1, 0.0)
    return request
