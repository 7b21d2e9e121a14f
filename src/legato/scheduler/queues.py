"""The queues of waiting and running requests."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from sortedcontainers import SortedKeyList

from legato.core.request import Request
from legato.scheduler.fair_queue import Ahead, FairQueue, is_turn_of_late
from legato.scheduler.order import LATE, PREEMPTED, Order, Rank, edf, rank
from legato.scheduler.tenants import Tenant, Tenants

Place = tuple[bool, float, bool, float]
"""Sort key over the prompts of all tenants, begun and waiting ones alike."""

_MOST_GIVEN_UP = 64
"""Most requests marked late at a time: a queue full of late requests must not stall planning."""


def _is_due(request: Request) -> bool:
    """Whether a request is sorted by its TTFT deadline; a preempted one goes before these."""
    return request.slo.ttft_s is not None and not request.num_preemptions


def never(request: Request) -> bool:  # noqa: ARG001
    return False


class Queues:
    """Running requests in order of admission, waiting ones by tenant and rank.

    Best-effort requests wait apart from those with a promise. No operation takes longer than
    O(log n) in the number waiting.

    Args:
        tenants: the requests' tenants; each has been seen before its request is added.
        is_lost, keeps_deadlines: as in `configure`.

    Attributes:
        is_urgent: whether requests go by TTFT deadline across tenants. They do if deadlines are
            kept and turns would miss one.
    """

    def __init__(
        self,
        order: Order,
        tenants: Tenants,
        *,
        is_lost: Callable[[Request], bool] = never,
        keeps_deadlines: bool = False,
    ) -> None:
        self.configure(order, is_lost=is_lost, keeps_deadlines=keeps_deadlines)
        self.tenants = tenants
        self.is_urgent = False
        self.running: OrderedDict[str, Request] = OrderedDict()  # key request id
        self._tenant_of_running: dict[str, Tenant] = {}  # key request id
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # key request id
        self._fair = {is_: FairQueue(tenants) for is_ in (False, True)}  # key is best-effort
        self._due = SortedKeyList(key=edf)  # waiting requests with a TTFT deadline

    def configure(
        self, order: Order, *, is_lost: Callable[[Request], bool], keeps_deadlines: bool
    ) -> None:
        """Rank requests by other rules; waiting requests keep their places until `take_waiting`.

        Args:
            is_lost: tells whether a waiting request can no longer get its first token in time.
            keeps_deadlines: whether a TTFT promised at admission is owed: late requests do not give
                way, and no tenant's turn makes another tenant's request late.
        """
        self.order = order
        self.is_lost = is_lost
        self.keeps_deadlines = keeps_deadlines

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting or request_id in self.running

    def __bool__(self) -> bool:
        return bool(self._waiting or self.running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def get(self, request_id: str) -> Request | None:
        return self.running.get(request_id) or self._waiting.get(request_id)

    def tenant(self, request: Request) -> Tenant:
        return self.tenants[request.message.service.tenant]

    def tenant_of_running(self, request_id: str) -> Tenant:
        """Return a running request's tenant; faster than `tenant`, for use on every chunk."""
        return self._tenant_of_running[request_id]

    def add(self, request: Request) -> None:
        """Add a waiting request at the place of its present rank."""
        tenant, request.rank = self.tenant(request), self._rank(request)  # these may raise
        tenant.count(waiting=1)
        self._waiting[request.request_id] = request
        self._fair[request.is_best_effort].add(request)
        if _is_due(request):
            self._due.add(request)

    def next_waiting(self, *, best_effort: bool) -> Request | None:
        """Return the waiting request that goes first; mark lost requests before it as late."""
        request = self._first(best_effort=best_effort)
        for _ in range(_MOST_GIVEN_UP):
            if request is None or request.is_late or not self.is_lost(request):
                break
            request.is_late = True
            self.rerank(request)
            request = self._first(best_effort=best_effort)
        return request

    def place(self, request: Request) -> Place:
        """Return a request's place among requests of its kind, best-effort or not."""
        group, rank_s = self._rank(request)
        if group == PREEMPTED:
            return False, 0.0, False, rank_s
        if self.is_urgent and _is_due(request):
            return True, -math.inf, False, edf(request)
        tenant = self.tenant(request)
        return True, tenant.counter_s, (group == LATE) is not is_turn_of_late(tenant), rank_s

    def least(self) -> Tenant | None:
        """Return the waiting tenant with the least service."""
        waiting = (queue.least() for queue in self._fair.values())
        return min(filter(None, waiting), key=lambda tenant: tenant.counter_s, default=None)

    def waiting_before(
        self, request: Request, cost_s: Callable[[Request], float], most: int
    ) -> Ahead:
        """Return the waiting requests with a promise that would go before a new request."""
        if not (self.keeps_deadlines and _is_due(request)):
            return self._fair[False].ahead(request, self._rank(request), cost_s, most)
        preempted = self._fair[False].preempted
        num_due = self._due.bisect_key_right(edf(request))
        first = [*islice(chain(preempted, self._due.islice(0, num_due)), most)]
        return Ahead(first, len(preempted) + num_due - len(first))

    def goes_before(self, begun: Request, request: Request) -> bool:
        """Whether a begun prompt with a promise would go before a new request."""
        if self.keeps_deadlines and _is_due(request):
            return bool(begun.num_preemptions) or (_is_due(begun) and edf(begun) <= edf(request))
        return self.place(begun) <= self.place(request)

    def due(self, most: int) -> list[Request]:
        """Return the requests with a TTFT deadline and no first token, earliest deadline first.

        Args:
            most: bound on the waiting requests; all running ones are included.
        """
        running = [
            request
            for request in self.running.values()
            if request.first_token_s is None and not request.is_stream and _is_due(request)
        ]
        return sorted([*running, *self._due.islice(0, most)], key=edf)

    def has_late(self, tenant: Tenant) -> bool:
        """Whether a tenant has late requests with a promise waiting."""
        return self._fair[False].has_late(tenant)

    def lines(self, *, best_effort: bool) -> Iterator[tuple[Tenant, Sequence[Request]]]:
        """Return each tenant's waiting requests that have not run, the next one first."""
        return self._fair[best_effort].lines()

    def most_waiting(self) -> Tenant | None:
        """Return the tenant with most waiting requests per weight."""
        tenants = (tenant for queue in self._fair.values() for tenant, _ in queue.lines())
        return max(tenants, key=lambda tenant: tenant.num_waiting / tenant.weight, default=None)

    def waive(self, request: Request) -> None:
        """Give up the promise of a request, waiting or not."""
        is_waiting = request.request_id in self._waiting
        if is_waiting:
            self._leave(request)
        request.give_up_promise()
        if is_waiting:
            self.add(request)

    def rotate_waiting(self) -> Request | None:
        """Return a waiting request, each in turn."""
        if not self._waiting:
            return None
        request_id = next(iter(self._waiting))
        self._waiting.move_to_end(request_id)
        return self._waiting[request_id]

    def take_waiting(self) -> list[Request]:
        """Remove and return all waiting requests, to be added again under another order."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for queue in self._fair.values():
            queue.clear()
        self._due.clear()
        for request in waiting:
            self.tenant(request).count(waiting=-1)
        return waiting

    def rerank(self, request: Request) -> None:
        """Move a waiting request to the place of its present rank."""
        queue, new_rank = self._fair[request.is_best_effort], self._rank(request)
        queue.remove(request)
        request.rank = new_rank
        queue.add(request)

    def admit(self, request: Request) -> None:
        self._leave(request)
        tenant = self.tenant(request)
        self.running[request.request_id] = request
        self._tenant_of_running[request.request_id] = tenant
        tenant.count(running=1)

    def preempt(self, request: Request) -> None:
        """Put a running request back into the queue, before requests that have not run."""
        self._stop(request)
        self.add(request)

    def last_running(self, accept: Callable[[Request], bool]) -> Request | None:
        """Return the latest admitted running request for which `accept` is true."""
        return next(filter(accept, reversed(self.running.values())), None)

    def remove(self, request: Request) -> None:
        if request.request_id in self.running:
            self._stop(request)
        else:
            self._leave(request)

    def _rank(self, request: Request) -> Rank:
        return rank(request, self.order, gives_up=not self.keeps_deadlines)

    def _first(self, *, best_effort: bool) -> Request | None:
        queue = self._fair[best_effort]
        if best_effort or not (self.is_urgent and self._due) or queue.preempted:
            return queue.first()
        first: Request = self._due[0]
        return first

    def _stop(self, request: Request) -> None:
        del self.running[request.request_id]
        self._tenant_of_running.pop(request.request_id).count(running=-1)

    def _leave(self, request: Request) -> None:
        del self._waiting[request.request_id]
        self._fair[request.is_best_effort].remove(request)
        if _is_due(request):
            self._due.remove(request)
        self.tenant(request).count(waiting=-1)
