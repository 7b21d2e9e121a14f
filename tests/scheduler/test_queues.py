"""The queues against a naive model that looks at every request."""

import itertools
from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from legato.core.request import Request
from legato.core.slo import SloClass
from legato.scheduler.order import ORDERS, rank
from legato.scheduler.queues import Queues
from tests.profiles import examples
from tests.scheduler.requests import waiting_request

SLOS = [SloClass(ttft_s=2.0), SloClass(ttft_s=5.0), SloClass(itl_s=0.1), SloClass()]


class QueuesMachine(RuleBasedStateMachine):
    """`waiting` and `running` are in the order in which the requests came to be there."""

    @initialize(order=st.sampled_from(sorted(ORDERS)))
    def start(self, order: str) -> None:
        self.queues = Queues(ORDERS[order])  # type: ignore[index]
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ids = map(str, itertools.count())
        self.now_s = 0.0

    @rule(
        passed_s=st.floats(0.0, 4.0),
        prompt_len=st.integers(1, 1000),
        priority=st.integers(-1, 1),
        slo=st.sampled_from(SLOS),
    )
    def add(self, passed_s: float, prompt_len: int, priority: int, slo: SloClass) -> None:
        self.now_s += passed_s
        request = waiting_request(
            next(self.ids),
            arrival_s=self.now_s,
            prompt_len=prompt_len,
            priority=priority,
            slo=slo,
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
    def demote_late(self, passed_s: float) -> None:
        self.now_s += passed_s
        before = {request.request_id: request.is_late for request in self.waiting}
        self.queues.demote_late(self.now_s)
        for request in self.waiting:
            deadline_s = request.ttft_deadline_s
            has_passed = deadline_s is not None and deadline_s < self.now_s
            assert before[request.request_id] <= request.is_late
            assert request.is_late <= has_passed, "demoted, but in time"
        first = self.queues.next_waiting(best_effort=False)
        deadline_s = None if first is None else first.ttft_deadline_s
        if first is not None and deadline_s is not None and deadline_s < self.now_s:
            assert first.is_late, "the first is late and goes before others that are not"

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "queues"):
            return
        for best_effort in (False, True):
            queue = [r for r in self.waiting if r.is_best_effort is best_effort]
            expected = min(queue, key=self.rank, default=None)
            found = self.queues.next_waiting(best_effort=best_effort)
            assert (found and self.rank(found)) == (expected and self.rank(expected))
        assert self.queues.num_waiting == len(self.waiting)
        assert bool(self.queues) is bool(self.waiting or self.running)
        assert list(self.queues.running.values()) == self.running
        for request in self.waiting + self.running:
            assert request.request_id in self.queues
            assert self.queues.get(request.request_id) is request

    @rule(prompt_len=st.integers(1, 1000), slo=st.sampled_from(SLOS[:-1]))
    def look_ahead(self, prompt_len: int, slo: SloClass) -> None:
        new = waiting_request("new", arrival_s=self.now_s, prompt_len=prompt_len, slo=slo)
        promised = [r for r in self.waiting if not r.is_best_effort]
        before = [r for r in promised if self.rank(r) <= self.rank(new)]
        found = list(self.queues.waiting_before(new))
        assert [self.rank(r) for r in found] == sorted(map(self.rank, before))
        assert set(found) == set(before)

    @rule(min_prompt_len=st.integers(1, 1000))
    def look_back(self, min_prompt_len: int) -> None:
        def accept(request: Request) -> bool:
            return len(request.message.prompt_token_ids) >= min_prompt_len

        accepted = [r for r in self.running if accept(r)]
        assert self.queues.last_running(accept) is (accepted[-1] if accepted else None)

    @property
    def rank(self) -> Callable[[Request], tuple[float, float]]:
        return lambda request: rank(request, self.queues.order)


TestQueues = QueuesMachine.TestCase
TestQueues.settings = examples(100, stateful_step_count=40)


def test_equal_ranks_go_in_the_order_they_came() -> None:
    queues = Queues(ORDERS["fcfs"])
    for request_id in "abc":
        queues.add(waiting_request(request_id))
    for request_id in "abc":
        request = queues.next_waiting(best_effort=True)
        assert request is not None
        assert request.request_id == request_id
        queues.admit(request)
