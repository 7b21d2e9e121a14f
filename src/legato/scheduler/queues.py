"""Where the requests are: waiting for admission, or running."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain

from legato.core.request import Request
from legato.scheduler.fair_queue import Ahead, FairQueue, is_lates_turn
from legato.scheduler.order import LATE, PREEMPTED, Order, Rank, rank
from legato.scheduler.tenants import Tenant, Tenants

Place = tuple[bool, float, bool, float]
"""Sorts prompts of all tenants, those that run and those that wait, by who goes first."""

_MOST_GIVEN_UP = 64
"""Requests that are found to be late at a time: planning must not stop for a queue full of them."""


def never(request: Request) -> bool:  # noqa: ARG001
    return False


class Queues:
    """Running requests in order of admission, waiting ones by tenant and rank.

    Best-effort requests wait apart from those with a promise. No operation takes longer than
    O(log n) in the number waiting.

    Args:
        tenants: whose requests they are; each has been seen before its request is added.

    Attributes:
        is_lost: whether a request that waits can no longer have its first token in time.
        gives_up: whether those that are late wait behind those that are not.
    """

    def __init__(self, order: Order, tenants: Tenants) -> None:
        self.order = order
        self.tenants = tenants
        self.is_lost: Callable[[Request], bool] = never
        self.gives_up = True
        self.running: OrderedDict[str, Request] = OrderedDict()  # key request id
        self._tenant_of_running: dict[str, Tenant] = {}  # key request id
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # key request id
        self._fair = {is_: FairQueue(tenants) for is_ in (False, True)}  # key is best-effort

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

    def next_waiting(self, *, best_effort: bool) -> Request | None:
        """The request that goes first; those that come up and are lost are late from here on."""
        queue = self._fair[best_effort]
        request = queue.first()
        for _ in range(_MOST_GIVEN_UP):
            if request is None or request.is_late or not self.is_lost(request):
                break
            request.is_late = True
            self.rerank(request)
            request = queue.first()
        return request

    def place(self, request: Request) -> Place:
        """Of a request with others of its kind, best-effort or not."""
        group, rank_s = self._rank(request)
        if group == PREEMPTED:
            return False, 0.0, False, rank_s
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
        return self._fair[False].ahead(request, self._rank(request), cost_s, most)

    def has_late(self, tenant: Tenant) -> bool:
        """Whether requests of a tenant wait that have a promise and are late."""
        return self._fair[False].has_late(tenant)

    def most_waiting(self) -> Tenant | None:
        """The tenant with most requests waiting, by its weight."""
        names = chain.from_iterable(queue.names() for queue in self._fair.values())
        tenants = map(self.tenants.__getitem__, names)
        return max(tenants, key=lambda tenant: tenant.num_waiting / tenant.weight, default=None)

    def last_waiting(self, tenant: Tenant) -> Request | None:
        """Which of a tenant's requests goes last, of those that have not run."""
        return self._fair[True].last_of(tenant) or self._fair[False].last_of(tenant)

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
        return rank(request, self.order, gives_up=self.gives_up)

    def _stop(self, request: Request) -> None:
        del self.running[request.request_id]
        self._tenant_of_running.pop(request.request_id).count(running=-1)

    def _leave(self, request: Request) -> None:
        del self._waiting[request.request_id]
        self._fair[request.is_best_effort].remove(request)
        self.tenant(request).count(waiting=-1)
