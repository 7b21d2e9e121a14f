"""The queues against a naive model that looks at every request."""

import itertools
import math
from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from legato.core.request import Request
from legato.core.slo import SloClass
from legato.core.tenant import DEFAULT_TENANT
from legato.scheduler.order import ORDERS, PREEMPTED, Rank, edf
from legato.scheduler.queues import Queues
from legato.scheduler.tenants import Tenants
from tests.profiles import examples
from tests.scheduler.requests import waiting_request

TENANTS = ["light", "heavy", "other"]
SLOS = [SloClass(ttft_s=2.0), SloClass(ttft_s=5.0), SloClass(itl_s=0.1), SloClass()]


class QueuesMachine(RuleBasedStateMachine):
    """`waiting` and `running` are in the order in which the requests came to be there."""

    @initialize(order=st.sampled_from(sorted(ORDERS)), keeps_deadlines=st.booleans())
    def start(self, order: str, keeps_deadlines: bool) -> None:
        self.tenants = Tenants({"heavy": 3.0})
        self.queues = Queues(
            ORDERS[order],  # type: ignore[index]
            self.tenants,
            is_lost=self.is_lost,
            alone_s=alone_s,
            keeps_deadlines=keeps_deadlines,
        )
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ids = map(str, itertools.count())
        self.now_s = 0.0

    @rule(
        passed_s=st.floats(0.0, 4.0),
        prompt_len=st.integers(1, 1000),
        priority=st.integers(-1, 1),
        slo=st.sampled_from(SLOS),
        tenant=st.sampled_from(TENANTS),
    )
    def add(
        self, passed_s: float, prompt_len: int, priority: int, slo: SloClass, tenant: str
    ) -> None:
        self.now_s += passed_s
        self.tenants.on_request(tenant, self.now_s)
        request = waiting_request(
            next(self.ids),
            arrival_s=self.now_s,
            prompt_len=prompt_len,
            priority=priority,
            slo=slo,
            tenant=tenant,
        )
        self.queues.add(request)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.queues.admit(request)
        self.waiting.remove(request)
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_computed_tokens=st.integers(0, 1000))
    def preempt(self, data: st.DataObject, num_computed_tokens: int) -> None:
        """Its rank changed while it ran."""
        request = data.draw(st.sampled_from(self.running))
        request.num_computed_tokens = min(num_computed_tokens, request.num_tokens - 1)
        request.num_preemptions += 1
        self.queues.preempt(request)
        self.running.remove(request)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting + self.running))
        self.queues.remove(request)
        (self.waiting if request in self.waiting else self.running).remove(request)

    @rule(passed_s=st.floats(0.0, 8.0))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), service_s=st.floats(0.0, 10.0), is_late=st.booleans())
    def serve(self, data: st.DataObject, service_s: float, is_late: bool) -> None:
        """A step whose prompts are one tenant's."""
        tenant = self.queues.tenant(data.draw(st.sampled_from(self.waiting)))
        tenant.charge(service_s)
        tenant.late_owed_s += -0.75 if is_late else 0.25

    @precondition(lambda self: self.queues.keeps_deadlines)
    @rule()
    def turn(self) -> None:
        self.queues.is_urgent = not self.queues.is_urgent

    def is_lost(self, request: Request) -> bool:
        deadline_s = request.ttft_deadline_s
        return deadline_s is not None and deadline_s < self.now_s

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "queues"):
            return
        known = list({self.queues.tenant(r): None for r in self.waiting})
        for without in ((), known[:1], known):
            queue = [r for r in self.waiting if self.queues.tenant(r) not in without]
            found = self.queues.next_waiting(without)
            assert (found is None) is (not queue)
            if found is None:
                continue
            if not (self.queues.keeps_deadlines or found.num_preemptions):
                assert found.is_late >= self.is_lost(found), "lost, and nobody noticed"
            place = self.queues.place(found)
            # Tenants with equal service go first in any order.
            assert place[:2] == min(self.queues.place(r)[:2] for r in queue)
            own = [r for r in queue if self.queues.tenant(r) is self.queues.tenant(found)]
            assert place == min(map(self.queues.place, own))
            if place[1] == -math.inf and place[2]:
                assert place == min(map(self.queues.place, queue))
        for name in TENANTS:
            self.check_counts(name)
        assert self.queues.num_waiting == len(self.waiting)
        assert bool(self.queues) is bool(self.waiting or self.running)
        assert list(self.queues.running.values()) == self.running
        for request in self.waiting + self.running:
            assert request.request_id in self.queues
            assert self.queues.get(request.request_id) is request

    def check_counts(self, name: str) -> None:
        for best_effort in (False, True):
            tenant = self.tenants.of(name, best_effort=best_effort)
            waiting, running = (
                sum(self.queues.tenant(r) is tenant for r in requests)
                for requests in (self.waiting, self.running)
            )
            assert (tenant.num_waiting, tenant.num_running) == (waiting, running)

    @rule(
        prompt_len=st.integers(1, 1000),
        slo=st.sampled_from(SLOS[:-1]),
        tenant=st.sampled_from(TENANTS),
    )
    def look_ahead(self, prompt_len: int, slo: SloClass, tenant: str) -> None:
        """Of its tenant all that go before it do, others' as far as their counters are less.

        Where deadlines are kept, all go before it that are due before it, of whichever tenant.
        """
        self.tenants.on_request(tenant, self.now_s)
        new = waiting_request(
            "new", arrival_s=self.now_s, prompt_len=prompt_len, slo=slo, tenant=tenant
        )
        cost_s = 0.5
        found, num_more = self.queues.waiting_before(new, lambda _: cost_s, len(self.waiting) + 1)
        assert num_more == 0
        own_tenant = self.queues.tenant(new)
        own = [r for r in self.waiting if goes_first(r) or self.queues.tenant(r) is own_tenant]
        before = [r for r in own if r.rank <= self.rank(new)]
        key = self.by_group
        if self.queues.keeps_deadlines and new.slo.ttft_s is not None:
            own, key = self.waiting, self.by_due
            before = [
                r
                for r in self.waiting
                if goes_first(r) or (r.slo.ttft_s and not r.num_preemptions and edf(r) <= edf(new))
            ]
        assert [r for r in found if r in own] == sorted(before, key=key)
        assert len(set(found)) == len(found)
        for most in range(1, len(found) + 1):
            ahead = self.queues.waiting_before(new, lambda _: cost_s, most)
            assert ahead.first == found[:most]
            assert len(ahead.first) + ahead.num_more <= len(self.waiting)
            if all(self.queues.tenant(r) is own_tenant for r in self.waiting):
                assert ahead.num_more == len(found) - most

    def by_group(self, request: Request) -> tuple[int, float, int]:
        return *request.rank, self.waiting.index(request)

    def by_due(self, request: Request) -> tuple[bool, float, int]:
        is_preempted = request.rank[0] == PREEMPTED
        rank_s = request.rank[1] if is_preempted else edf(request)
        return not is_preempted, rank_s, self.waiting.index(request)

    @property
    def rank(self) -> Callable[[Request], Rank]:
        return self.queues.rank


def goes_first(request: Request) -> bool:
    return bool(request.num_preemptions) and not request.is_best_effort


def alone_s(request: Request) -> float:
    return 1e-3 * request.num_missing_tokens


TestQueues = QueuesMachine.TestCase
TestQueues.settings = examples(100, stateful_step_count=40)


def test_equal_ranks_go_in_the_order_they_came() -> None:
    queues = Queues(ORDERS["fcfs"], tenants := Tenants({}))
    tenants.on_request(DEFAULT_TENANT, 0.0)
    for request_id in "abc":
        queues.add(waiting_request(request_id))
    for request_id in "abc":
        request = queues.next_waiting()
        assert request is not None
        assert request.request_id == request_id
        queues.admit(request)
