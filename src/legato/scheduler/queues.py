"""Where the requests are: waiting for admission, or running."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from sortedcontainers import SortedKeyList

from legato.core.request import Request
from legato.scheduler.fair_queue import Ahead, FairQueue, is_lates_turn
from legato.scheduler.order import LATE, PREEMPTED, Order, Rank, edf, rank
from legato.scheduler.tenants import Tenant, Tenants

Place = tuple[bool, float, bool, float]
"""Sorts prompts of all tenants, those that run and those that wait, by who goes first."""

_MOST_GIVEN_UP = 64
"""Requests that are found to be late at a time: planning must not stop for a queue full of them."""


def _is_due(request: Request) -> bool:
    """Whether it has a place among those with a TTFT deadline; a preempted one goes before."""
    return request.slo.ttft_s is not None and not request.num_preemptions


def never(request: Request) -> bool:  # noqa: ARG001
    return False


class Queues:
    """Running requests in order of admission, waiting ones by tenant and rank.

    Best-effort requests wait apart from those with a promise. No operation takes longer than
    O(log n) in the number waiting.

    Args:
        tenants: whose requests they are; each has been seen before its request is added.
        is_lost, keeps_deadlines: as of `configure`.

    Attributes:
        is_urgent: whether requests go by their TTFT deadlines, of whichever tenant, as they do
            where deadlines are kept and would not be by turns.
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
        self._due = SortedKeyList(key=edf)  # those that wait with a TTFT deadline

    def configure(
        self, order: Order, *, is_lost: Callable[[Request], bool], keeps_deadlines: bool
    ) -> None:
        """Rank requests anew from here on; those that wait keep their places until `take_waiting`.

        Args:
            is_lost: whether a request that waits can no longer have its first token in time.
            keeps_deadlines: whether a first token that was promised at admission is owed: those
                that are late do not give way, and no tenant's turn makes another's request late.
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
        """Quicker than `tenant`, for whoever asks for each chunk of a step."""
        return self._tenant_of_running[request_id]

    def add(self, request: Request) -> None:
        """Let a request wait, at the place that its rank now gives it."""
        tenant, request.rank = self.tenant(request), self._rank(request)  # these may raise
        tenant.count(waiting=1)
        self._waiting[request.request_id] = request
        self._fair[request.is_best_effort].add(request)
        if _is_due(request):
            self._due.add(request)

    def next_waiting(self, *, best_effort: bool) -> Request | None:
        """The request that goes first; those that come up and are lost are late from here on."""
        request = self._first(best_effort=best_effort)
        for _ in range(_MOST_GIVEN_UP):
            if request is None or request.is_late or not self.is_lost(request):
                break
            request.is_late = True
            self.rerank(request)
            request = self._first(best_effort=best_effort)
        return request

    def place(self, request: Request) -> Place:
        """Of a request with others of its kind, best-effort or not."""
        group, rank_s = self._rank(request)
        if group == PREEMPTED:
            return False, 0.0, False, rank_s
        if self.is_urgent and _is_due(request):
            return True, -math.inf, False, edf(request)
        tenant = self.tenant(request)
        return True, tenant.counter_s, (group == LATE) is not is_lates_turn(tenant), rank_s

    def least(self) -> Tenant | None:
        """The tenant that has had least of those that wait."""
        waiting = (queue.least() for queue in self._fair.values())
        return min(filter(None, waiting), key=lambda tenant: tenant.counter_s, default=None)

    def waiting_before(
        self, request: Request, cost_s: Callable[[Request], float], most: int
    ) -> Ahead:
        """Return the waiting requests with a promise that would go before a request to come."""
        if not (self.keeps_deadlines and _is_due(request)):
            return self._fair[False].ahead(request, self._rank(request), cost_s, most)
        preempted = self._fair[False].preempted
        num_due = self._due.bisect_key_right(edf(request))
        first = [*islice(chain(preempted, self._due.islice(0, num_due)), most)]
        return Ahead(first, len(preempted) + num_due - len(first))

    def goes_before(self, begun: Request, request: Request) -> bool:
        """Whether a prompt with a promise that has begun would go before a request to come."""
        if self.keeps_deadlines and _is_due(request):
            return bool(begun.num_preemptions) or (_is_due(begun) and edf(begun) <= edf(request))
        return self.place(begun) <= self.place(request)

    def due(self, most: int) -> list[Request]:
        """Requests with a TTFT deadline whose first token has not come, as they go where urgent.

        Args:
            most: of those that wait; those that run are all among them.
        """
        running = [
            request
            for request in self.running.values()
            if request.first_token_s is None and not request.is_stream and _is_due(request)
        ]
        return sorted([*running, *self._due.islice(0, most)], key=edf)

    def has_late(self, tenant: Tenant) -> bool:
        """Whether requests of a tenant wait that have a promise and are late."""
        return self._fair[False].has_late(tenant)

    def lines(self, *, best_effort: bool) -> Iterator[tuple[Tenant, Sequence[Request]]]:
        """Each tenant's requests that wait and have not run, in the order in which they go."""
        return self._fair[best_effort].lines()

    def most_waiting(self) -> Tenant | None:
        """The tenant with most requests waiting, by its weight."""
        tenants = (tenant for queue in self._fair.values() for tenant, _ in queue.lines())
        return max(tenants, key=lambda tenant: tenant.num_waiting / tenant.weight, default=None)

    def waive(self, request: Request) -> None:
        """Let a request give up its promise, which may wait or not."""
        is_waiting = request.request_id in self._waiting
        if is_waiting:
            self._leave(request)
        request.give_up_promise()
        if is_waiting:
            self.add(request)

    def rotate_waiting(self) -> Request | None:
        """One of those that wait; they come up in turn."""
        if not self._waiting:
            return None
        request_id = next(iter(self._waiting))
        self._waiting.move_to_end(request_id)
        return self._waiting[request_id]

    def take_waiting(self) -> list[Request]:
        """Remove all that wait, for `add` to find them places by another order."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for queue in self._fair.values():
            queue.clear()
        self._due.clear()
        for request in waiting:
            self.tenant(request).count(waiting=-1)
        return waiting

    def rerank(self, request: Request) -> None:
        """Give a waiting request the place that its rank has come to be."""
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
        """Put a running request back, before those that have not run yet."""
        self._stop(request)
        self.add(request)

    def last_running(self, accept: Callable[[Request], bool]) -> Request | None:
        """The latest admitted of those that `accept` is true for."""
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
