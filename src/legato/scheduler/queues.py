"""The queues of waiting and running requests."""

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import chain, islice

from sortedcontainers import SortedKeyList

from legato.core.request import Request
from legato.scheduler.fair_queue import Ahead, FairQueue
from legato.scheduler.order import LATE, PREEMPTED, Order, Rank, edf, rank
from legato.scheduler.tenants import Tenant, Tenants

Place = tuple[bool, float, bool, float]
"""Sort key over the prompts of all tenants, begun and waiting ones alike."""

_MOST_ASKED = 64
"""Most requests asked at a time whether they are late: a long queue must not stall planning."""


def _is_due(request: Request) -> bool:
    """Whether a request is sorted by its TTFT deadline; a preempted one goes before these."""
    return request.slo.ttft_s is not None and not request.num_preemptions


def never(request: Request) -> bool:  # noqa: ARG001
    return False


def nothing_s(request: Request) -> float:  # noqa: ARG001
    return 0.0


class Queues:
    """Running requests in order of admission, waiting ones by tenant and rank.

    Beside promised requests, a tenant's best-effort ones wait as those of another tenant. No
    operation takes longer than O(log n) in the number waiting.

    Args:
        tenants: the requests' tenants.
        is_lost, alone_s, keeps_deadlines, has_promises: as in `configure`.

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
        alone_s: Callable[[Request], float] = nothing_s,
        keeps_deadlines: bool = False,
        has_promises: bool = True,
    ) -> None:
        self.configure(
            order,
            is_lost=is_lost,
            alone_s=alone_s,
            keeps_deadlines=keeps_deadlines,
            has_promises=has_promises,
        )
        self.tenants = tenants
        self.is_urgent = False
        self.running: OrderedDict[str, Request] = OrderedDict()  # key request id
        self._tenant_of_running: dict[str, Tenant] = {}  # key request id
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # key request id
        self._fair = FairQueue(self.tenant)
        self._due = SortedKeyList(key=edf)  # waiting requests with a TTFT deadline

    def configure(
        self,
        order: Order,
        *,
        is_lost: Callable[[Request], bool],
        alone_s: Callable[[Request], float],
        keeps_deadlines: bool,
        has_promises: bool,
    ) -> None:
        """Rank requests by other rules; none may be waiting, see `take_waiting`.

        Args:
            is_lost: tells whether a waiting request can no longer get its first token in time.
            alone_s: predicts the seconds that the rest of a prompt takes alone.
            keeps_deadlines: whether a TTFT promised at admission is owed: late requests do not give
                way, and no tenant's turn makes another tenant's request late.
            has_promises: whether any class has one; else no request is less than another.
        """
        self.order = order
        self._has_promises = has_promises
        self.is_lost = is_lost
        self.alone_s = alone_s
        self.keeps_deadlines = keeps_deadlines

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting or request_id in self.running

    def __bool__(self) -> bool:
        return bool(self._waiting or self.running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def joining(self) -> list[Request]:
        """Running requests that a step planned now may move forward, in order of admission."""
        return [r for r in self.running.values() if not (r.num_passed_over or r.ends_in_flight)]

    def get(self, request_id: str) -> Request | None:
        return self.running.get(request_id) or self._waiting.get(request_id)

    def tenant(self, request: Request) -> Tenant:
        name = request.message.service.tenant
        return self.tenants.of(name, best_effort=self._is_apart(request))

    def note_arrival(self, request: Request, now_s: float) -> None:
        """Record a new request of a tenant, before its first `add`."""
        name = request.message.service.tenant
        self.tenants.on_request(name, now_s, best_effort=self._is_apart(request))

    @property
    def running_tenants(self) -> set[Tenant]:
        """The tenants that have running requests."""
        return {*self._tenant_of_running.values()}

    def tenant_of_running(self, request_id: str) -> Tenant:
        """Return a running request's tenant; faster than `tenant`, for use on every chunk."""
        return self._tenant_of_running[request_id]

    def add(self, request: Request) -> None:
        """Add a waiting request at the place of its present rank."""
        tenant, request.rank = self.tenant(request), self.rank(request)  # these may raise
        self._lift_if_idle(tenant)
        tenant.count(waiting=1)
        self._waiting[request.request_id] = request
        self._fair.add(request)
        if _is_due(request):
            self._due.add(request)

    def next_waiting(self, without: Container[Tenant] = ()) -> Request | None:
        """Return the waiting request that goes first.

        Whether a request is late is asked anew: a passing slowness marks none for good.

        Args:
            without: tenants that are left out.
        """
        request = self._first(without)
        for _ in range(_MOST_ASKED):
            if request is None or request.num_preemptions or self.keeps_deadlines:
                break
            last_late = self._fair.last_late(self.tenant(request))
            if last_late is not None and last_late.is_late and not self.is_lost(last_late):
                self._note_late(last_late, is_late=False)
            elif not request.is_late and self.is_lost(request):
                self._note_late(request, is_late=True)
            else:
                break
            request = self._first(without)
        return request

    def place(self, request: Request) -> Place:
        """Return a request's place among all prompts."""
        group, rank_s = self.rank(request)
        tenant = self.tenant(request)
        if group == PREEMPTED and not tenant.is_best_effort:
            return False, 0.0, False, rank_s
        rank_s = -math.inf if group == PREEMPTED else rank_s
        is_turn = (group == LATE) is (tenant.late_owed_s > 0.0)
        if self.is_urgent:
            if _is_due(request):
                return True, -math.inf, True, edf(request)
            if self._interrupts(tenant, group):
                return True, -math.inf, False, rank_s
        return True, tenant.counter_s, not is_turn, rank_s

    def least(self) -> Tenant | None:
        """Return the waiting tenant with the least service."""
        return self._fair.least()

    def waiting_before(
        self, request: Request, cost_s: Callable[[Request], float], most: int
    ) -> Ahead:
        """Return the waiting requests that would go before a new request with a promise."""
        if not (self.keeps_deadlines and _is_due(request)):
            request.rank = self.rank(request)
            return self._fair.ahead(request, cost_s, most)
        preempted = self._fair.preempted
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
        return self._fair.last_late(tenant) is not None

    def lines(self) -> Iterator[tuple[Tenant, Sequence[Request]]]:
        """Yield each tenant's waiting requests, the next one first, but no preempted stream."""
        return self._fair.lines()

    def most_waiting(self) -> Tenant | None:
        """Return the tenant with most waiting requests per weight, best-effort ones apart."""
        tenants = (tenant for tenant, _ in self._fair.lines() if not tenant.is_best_effort)
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
        self._fair.clear()
        self._due.clear()
        for request in waiting:
            self.tenant(request).count(waiting=-1)
        return waiting

    def rerank(self, request: Request) -> None:
        """Move a waiting request to the place of its present rank."""
        new_rank = self.rank(request)
        if new_rank == request.rank:
            return  # among equals it keeps its place
        self._fair.remove(request)
        request.rank = new_rank
        self._fair.add(request)

    def admit(self, request: Request) -> None:
        self._leave(request)
        tenant = self.tenant(request)
        self.running[request.request_id] = request
        self._tenant_of_running[request.request_id] = tenant
        tenant.count(running=1)

    def settle_running(self) -> None:
        """Count running requests for their tenants again, after promises have changed."""
        for request_id, request in self.running.items():
            self._tenant_of_running[request_id].count(running=-1)
            tenant = self._tenant_of_running[request_id] = self.tenant(request)
            self._lift_if_idle(tenant)
            tenant.count(running=1)

    def preempt(self, request: Request) -> None:
        """Put a running request back into the queue, before requests that have not run."""
        self._stop(request)
        self.add(request)

    def remove(self, request: Request) -> None:
        if request.request_id in self.running:
            self._stop(request)
        else:
            self._leave(request)

    def rank(self, request: Request) -> Rank:
        """Return the present rank of a request among those of its tenant."""
        group, rank_s = rank(
            request, self.order, self.alone_s(request), gives_up=not self.keeps_deadlines
        )
        has_no_deadline = request.slo.ttft_s is None and not request.is_best_effort
        if self.keeps_deadlines and group != PREEMPTED and has_no_deadline:
            group = LATE  # deadlines leave it the same share as late requests
        return group, rank_s

    def _lift_if_idle(self, tenant: Tenant) -> None:
        """A request that has just become best-effort joins a tenant that had none for a while."""
        if tenant.is_best_effort and not (tenant.num_waiting or tenant.num_running):
            self.tenants.lift(tenant)

    def _is_apart(self, request: Request) -> bool:
        return request.is_best_effort and self._has_promises

    def _note_late(self, request: Request, *, is_late: bool) -> None:
        request.is_late = is_late
        self.rerank(request)

    def _interrupts(self, tenant: Tenant, group: int) -> bool:
        """Whether it is the turn of a request without a deadline before urgent ones.

        So deadlines leave their shares to best-effort requests and to late ones.
        """
        least = self.least()
        is_next = least is None or tenant is least or tenant.counter_s < least.counter_s
        is_owed = tenant.is_best_effort or (group == LATE and tenant.late_owed_s > 0.0)
        return is_next and is_owed

    def _first(self, without: Container[Tenant]) -> Request | None:
        first = self._fair.first(without)
        if first is None or not (self.is_urgent and self._due):
            return first
        tenant = self.tenant(first)
        if first.num_preemptions and not tenant.is_best_effort:
            return first
        if not _is_due(first) and self._interrupts(tenant, first.rank[0]):
            return first
        due = (one for one in self._due.islice(0, _MOST_ASKED) if self.tenant(one) not in without)
        return next(due, first)

    def _stop(self, request: Request) -> None:
        del self.running[request.request_id]
        self._tenant_of_running.pop(request.request_id).count(running=-1)

    def _leave(self, request: Request) -> None:
        del self._waiting[request.request_id]
        self._fair.remove(request)
        if _is_due(request):
            self._due.remove(request)
        self.tenant(request).count(waiting=-1)
