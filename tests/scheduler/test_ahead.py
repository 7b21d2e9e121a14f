"""What is forecast to go before a request that has not come is what goes before it."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.request import Request
from legato.core.slo import SloClass
from legato.scheduler.order import ORDERS
from legato.scheduler.queues import Queues
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from legato.scheduler.tenants import Tenants
from tests.profiles import examples
from tests.scheduler.harness import Harness
from tests.scheduler.requests import waiting_request
from tests.scheduler.step_times import calibrate
from tests.scheduler.test_outlook import COSTS

SLOS = [SloClass(ttft_s=2.0), SloClass(ttft_s=5.0), SloClass(itl_s=0.1), SloClass()]
WEIGHTS = {"t0": 2.0, "t1": 0.5, "t2": 4.0}
"""Powers of two, as are the prompts' costs: sums of them are exact, however they are added."""

PROMPTS = st.tuples(
    st.integers(0, 11),  # tenant
    st.integers(0, 10),  # prompt tokens, as a power of two
    st.sampled_from(SLOS),
    st.integers(-1, 1),  # priority
    st.sampled_from([False, False, False, True]),  # preempted
)


def cost_s(request: Request) -> float:
    return request.num_tokens / 2**10


class Line:
    """Requests of many tenants that wait, and one that has not come."""

    def __init__(
        self,
        prompts: list[tuple[int, int, SloClass, int, bool]],
        counters: list[int],
        new: tuple[int, int, SloClass, int, bool],
        order: str,
        *,
        keeps_deadlines: bool = False,
    ) -> None:
        """Args: keeps_deadlines: and all of them are urgent, as they are when it matters."""
        self.tenants = Tenants(WEIGHTS)
        self.queues = Queues(
            ORDERS[order],  # type: ignore[index]
            self.tenants,
            alone_s=cost_s,
            keeps_deadlines=keeps_deadlines,
        )
        self.queues.is_urgent = keeps_deadlines
        self.now_s = 0.0
        # Counters of tenants differ: among equals the queue may take either first.
        for i, counter in enumerate(counters):
            self.tenants.of(f"t{i}").counter_s = counter + i / 2**20
            self.tenants.of(f"t{i}", best_effort=True).counter_s = counter + (i + 0.5) / 2**20
        for i, prompt in enumerate(prompts):
            self.now_s += 0.125
            request = self.request(str(i), prompt)
            if prompt[-1]:
                request.num_preemptions = 1
            self.queues.add(request)
        is_asked = new[2].ttft_s if keeps_deadlines else new[2] is not SLOS[-1]
        self.new = self.request("new", (*new[:2], new[2] if is_asked else SLOS[0], 0, False))

    def request(self, name: str, prompt: tuple[int, int, SloClass, int, bool]) -> Request:
        tenant, size, slo, priority, _ = prompt
        self.tenants.on_request(f"t{tenant}", self.now_s)
        return waiting_request(
            name,
            arrival_s=self.now_s,
            prompt_len=2**size,
            slo=slo,
            priority=priority,
            tenant=f"t{tenant}",
        )

    @property
    def without_deadline(self) -> set[str]:
        waiting = [self.queues.get(str(i)) for i in range(self.queues.num_waiting)]
        return {
            r.request_id
            for r in waiting
            if r is not None
            and (r.is_best_effort or (r.slo.ttft_s is None and not r.num_preemptions))
        }

    def served_before(self) -> list[str]:
        """Let all be served, the new one among them."""
        self.queues.add(self.new)
        served: list[str] = []
        while (request := self.queues.next_waiting()) is not self.new:
            assert request is not None
            self.queues.remove(request)
            served.append(request.request_id)
            if not request.num_preemptions or request.is_best_effort:
                self.queues.tenant(request).charge(cost_s(request))
        self.queues.remove(self.new)
        return served


LINES: dict[str, st.SearchStrategy[Any]] = {
    "prompts": st.lists(PROMPTS, max_size=40),
    "counters": st.lists(st.integers(0, 4), min_size=12, max_size=12),
    "new": PROMPTS,
    "most": st.integers(1, 45),
}


@pytest.mark.parametrize("keeps_deadlines", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@given(**LINES)
@examples(60)
def test_the_forecast_is_the_order_in_which_the_queue_serves(
    order: str,
    keeps_deadlines: bool,
    prompts: list[tuple[int, int, SloClass, int, bool]],
    counters: list[int],
    new: tuple[int, int, SloClass, int, bool],
    most: int,
) -> None:
    line = Line(prompts, counters, new, order, keeps_deadlines=keeps_deadlines)
    first, num_more = line.queues.waiting_before(line.new, cost_s, most)
    owed = line.without_deadline
    served = line.served_before()
    if keeps_deadlines:  # shares of those without a deadline are not foreseen one by one
        served = [request_id for request_id in served if request_id not in owed]
    assert [request.request_id for request in first] == served[:most]
    if len(served) <= most:
        assert num_more == 0
    else:
        assert len(first) == most
        assert 0 <= num_more <= len(prompts) - most


@given(**LINES)
@examples(100)
def test_the_number_is_exact_where_all_prompts_cost_the_same(
    prompts: list[tuple[int, int, SloClass, int, bool]],
    counters: list[int],
    new: tuple[int, int, SloClass, int, bool],
    most: int,
) -> None:
    alike = [(tenant, 5, slo, priority, False) for tenant, _, slo, priority, _ in prompts]
    line = Line(alike, counters, (new[0], 5, *new[2:]), "fcfs")
    first, num_more = line.queues.waiting_before(line.new, cost_s, most)
    assert len(first) + num_more == len(line.served_before())


@pytest.mark.parametrize("num_waiting", [1, 3, 60])
@pytest.mark.parametrize("tenants", [("a", "b"), ("b", "a"), ("a", "a")], ids="".join)
def test_a_request_of_another_tenant_is_forecast(
    num_waiting: int, tenants: tuple[str, str]
) -> None:
    """The division by zero that ended engines: nothing goes before it, but others wait."""
    harness = shedding_harness(max_num_seqs=2)
    ids = map(str, itertools.count())
    for _ in range(2):
        harness.add(next(ids), 40, 100, tenant="x")
    harness.step()
    for _ in range(num_waiting):
        harness.add(next(ids), 40, 4, tenant=tenants[1])
    harness.add("new", 40, 4, tenant=tenants[0])
    assert harness.scheduler.state(harness.clock()).delay_s > 0.0
    harness.drain()
    assert all(len(reasons) == 1 for reasons in harness.finish_reasons.values())


def test_the_state_is_told_where_a_batch_tenant_has_most_waiting() -> None:
    """Its one prompt with a promise waits beside another tenant's, whose turn it is not."""
    harness = shedding_harness(max_num_seqs=1)
    harness.add("running", 40, 100, tenant="x")
    harness.step()
    for i in range(5):
        harness.add(f"batch {i}", 40, 4, tenant="b", slo_class="batch")
    harness.add("one", 40, 4, tenant="a")
    harness.scheduler.state(harness.clock())
    harness.drain()


def shedding_harness(max_num_seqs: int) -> Harness:
    return Harness(
        max_num_seqs=max_num_seqs,
        num_blocks=2000,
        max_model_len=400,
        shed_load=True,
        ttft_slo_s=600.0,
        step_time=StepTimeModel(calibrate(COSTS, 400)),
        step_time_s=lambda plan: COSTS.seconds(StepShape.of(plan)),
    )
