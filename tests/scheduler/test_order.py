"""Who goes before whom, order by order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.request import Request
from legato.core.slo import SloClass
from legato.scheduler.order import (
    ORDERS,
    PRIORITY_STEP_S,
    Order,
    Rank,
    edf,
    fcfs,
    lpm,
    slowdown,
)
from legato.scheduler.order import rank as rank_after
from tests.scheduler.requests import waiting_request

SOON, LATER = SloClass(ttft_s=1.0), SloClass(ttft_s=30.0)


def rank(request: Request, order: Order) -> Rank:
    """Where a token takes a millisecond alone."""
    return rank_after(request, order, 1e-3 * request.num_missing_tokens)


def test_first_come_first_served() -> None:
    early = waiting_request(arrival_s=1.0, prompt_len=5000, slo=LATER)
    late = waiting_request(arrival_s=1.1, prompt_len=1, slo=SOON)
    assert rank(early, fcfs) < rank(late, fcfs)


def test_a_short_prompt_passes_a_long_one_until_that_has_waited() -> None:
    """Each is due when its first token comes five times later than alone."""
    long = waiting_request(arrival_s=0.0, prompt_len=2000)
    for arrival_s, is_first in ((0.0, True), (9.0, True), (9.4, True), (9.6, False)):
        short = waiting_request(arrival_s=arrival_s, prompt_len=100)
        assert (rank(short, slowdown) < rank(long, slowdown)) is is_first


def test_a_ttft_promise_is_due_even_if_the_prompt_is_long() -> None:
    promised = waiting_request(arrival_s=0.0, prompt_len=8000, slo=SOON)
    short = waiting_request(arrival_s=0.9, prompt_len=40, slo=SloClass(itl_s=0.1))
    assert rank(promised, slowdown) < rank(short, slowdown)
    assert rank(waiting_request(arrival_s=0.7, prompt_len=40), slowdown) < rank(promised, slowdown)


def test_what_has_been_computed_does_not_remain() -> None:
    begun, new = waiting_request(prompt_len=200), waiting_request(prompt_len=100)
    begun.num_computed_tokens = 150
    assert rank(begun, slowdown) < rank(new, slowdown)


@pytest.mark.parametrize("order", [slowdown, lpm])
def test_what_is_cached_goes_first_until_the_other_has_waited(order: Order) -> None:
    """100 tokens that need not be computed are worth half a second."""
    cold = waiting_request(arrival_s=0.0, prompt_len=200)
    for arrival_s, is_first in ((0.4, True), (0.6, False)):
        cached = waiting_request(arrival_s=arrival_s, prompt_len=200)
        cached.num_hit_tokens = 100
        assert (rank(cached, order) < rank(cold, order)) is is_first


def test_the_earliest_deadline_goes_first() -> None:
    soon = waiting_request(arrival_s=20.0, slo=SOON)
    later = waiting_request(arrival_s=0.0, slo=LATER)
    nothing = waiting_request(arrival_s=0.0, slo=SloClass(itl_s=0.1))
    assert rank(soon, edf) < rank(later, edf) < rank(nothing, edf)


@pytest.mark.parametrize("order", [edf, slowdown])
def test_a_request_that_is_late_goes_behind_all_that_are_not(order: Order) -> None:
    late = waiting_request(arrival_s=0.0, slo=SOON, priority=-100)
    late.is_late = True
    assert rank(waiting_request(arrival_s=1e6, slo=LATER, priority=100), order) < rank(late, order)
    assert rank(late, fcfs) < rank(waiting_request(arrival_s=1.0, slo=SOON), fcfs)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_step_of_priority_is_worth_a_bounded_time(order: Order) -> None:
    urgent = waiting_request(arrival_s=PRIORITY_STEP_S, priority=-1)
    assert rank(urgent, order) == pytest.approx(rank(waiting_request(), order))


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_preempted_stream_goes_before_all_others(order: Order) -> None:
    preempted = waiting_request(arrival_s=100.0, priority=100)
    preempted.num_preemptions = 1
    other = waiting_request(arrival_s=0.0, priority=-100, prompt_len=1, slo=SOON)
    assert rank(preempted, order) < rank(other, order)


@given(
    prompt_lens=st.tuples(st.integers(1, 8000), st.integers(1, 8000)),
    slos=st.tuples(*[st.sampled_from([SOON, LATER, SloClass()])] * 2),
    priority=st.integers(-100, 100),
)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_nobody_is_overtaken_after_the_delay_of_its_own_rank(
    order: Order,
    prompt_lens: tuple[int, int],
    slos: tuple[SloClass, SloClass],
    priority: int,
) -> None:
    """A request that arrives that long after it ranks after it, in any case."""
    first = waiting_request(prompt_len=prompt_lens[0], slo=slos[0], priority=priority)
    delay_s = rank(first, order)[1] - PRIORITY_STEP_S * priority
    newcomer = waiting_request(
        arrival_s=delay_s, prompt_len=prompt_lens[1], slo=slos[1], priority=priority
    )
    assert rank(newcomer, order) >= rank(first, order)
