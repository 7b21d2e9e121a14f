"""Waiting requests by tenant: the tenant with the least service goes first."""

import heapq
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from sortedcontainers import SortedKeyList

from legato.core.request import Request
from legato.scheduler.order import LATE, PREEMPTED, Rank
from legato.scheduler.tenants import Tenant

_FIRST_LATE = (LATE, -math.inf)
_MOST_STALE = 16


class Ahead(NamedTuple):
    """Requests ahead of another: the first ones, and how many more to expect."""

    first: list[Request]
    num_more: int


class _Turns:
    """A tenant's requests that may go before the request of a forecast, the next one first.

    Turns sort by the tenant's counter in the forecast. Among equals the tenant of the forecast's
    request is first: its turn ends the forecast.
    """

    __slots__ = ("_counter_s", "_is_other", "_requests", "_weight", "num_left")

    def __init__(
        self, tenant: Tenant, requests: Iterable[Request], num_left: int, *, is_other: bool
    ) -> None:
        self._counter_s = tenant.counter_s
        self._is_other = is_other
        self._weight = tenant.weight
        self._requests = iter(requests)
        self.num_left = num_left

    def __lt__(self, other: "_Turns") -> bool:
        return (self._counter_s, self._is_other) < (other._counter_s, other._is_other)

    def take(self) -> Request:
        self.num_left -= 1
        return next(self._requests)

    def charge(self, prompt_s: float) -> None:
        self._counter_s += prompt_s / self._weight

    def num_before(self, own: "_Turns", mean_s: float) -> int:
        """Estimate how many requests go before the turn of `own` if each prompt takes `mean_s`."""
        owed_s = (own._counter_s - self._counter_s) * self._weight
        if owed_s <= 0.0:
            return 0
        return min(self.num_left, math.ceil(owed_s / mean_s)) if mean_s else self.num_left


class FairQueue:
    """Queue of waiting requests.

    Preempted requests with a promise go before all others, whichever tenant owns them: their
    streams stand still. No operation takes longer than O(log n) in the number of requests, or of
    tenants, for each tenant that is left out.

    Args:
        tenant_of: finds the tenant of a request.
    """

    def __init__(self, tenant_of: Callable[[Request], Tenant]) -> None:
        self._tenant_of = tenant_of
        self._preempted = _by_rank()
        self._by_tenant: dict[Tenant, SortedKeyList] = {}  # no queue is empty
        # (counter, tie, tenant). Counters only grow: a stale entry is corrected at the top.
        self._heap: list[tuple[float, int, Tenant]] = []
        self._ties = itertools.count()

    def add(self, request: Request) -> None:
        """Add a request at its `rank`."""
        tenant = self._tenant_of(request)
        if _goes_first(request, tenant):
            self._preempted.add(request)
            return
        queue = self._by_tenant.get(tenant)
        if queue is None:
            queue = self._by_tenant[tenant] = _by_rank()
            self._push(tenant)
        queue.add(request)

    def remove(self, request: Request) -> None:
        """Remove a request, whose `rank` must not have changed since `add`."""
        tenant = self._tenant_of(request)
        if _goes_first(request, tenant):
            self._preempted.remove(request)
            return
        queue = self._by_tenant[tenant]
        queue.remove(request)
        if not queue:
            del self._by_tenant[tenant]

    def clear(self) -> None:
        self._preempted.clear()
        self._by_tenant.clear()
        self._heap.clear()

    @property
    def preempted(self) -> Sequence[Request]:
        """The preempted requests with a promise, the next one first."""
        preempted: Sequence[Request] = self._preempted
        return preempted

    def first(self, without: Container[Tenant] = ()) -> Request | None:
        """Return the next request, of other tenants than those `without`."""
        for request in self._preempted:
            if self._tenant_of(request) not in without:
                first: Request = request
                return first
        tenant = self.least(without)
        return None if tenant is None else self._first_of(tenant)

    def least(self, without: Container[Tenant] = ()) -> Tenant | None:
        """Return the waiting tenant with the least service."""
        left_out: list[tuple[float, int, Tenant]] = []
        found = self._least()
        while found is not None and found in without:
            left_out.append(heapq.heappop(self._heap))
            found = self._least()
        for entry in left_out:
            heapq.heappush(self._heap, entry)
        return found

    def lines(self) -> Iterator[tuple[Tenant, Sequence[Request]]]:
        """Yield each tenant's requests except preempted ones, the next one first."""
        yield from self._by_tenant.items()

    def last_late(self, tenant: Tenant) -> Request | None:
        """Return the last of a tenant's late requests."""
        queue = self._by_tenant.get(tenant)
        last: Request | None = None if queue is None else queue[-1]
        return last if last is not None and last.rank[0] == LATE else None

    def ahead(self, request: Request, cost_s: Callable[[Request], float], most: int) -> Ahead:
        """Return the requests expected to go before a request that is not queued yet.

        Its tenant's late requests are left out unless it is late itself: they have a share, not
        places in the order.

        Args:
            request: with the `rank` that it would have.
            cost_s: seconds of a request's prompt, which its tenant is charged.
            most: requests to return one by one, at least 1.
        """
        first: list[Request] = [*itertools.islice(self._preempted, most)]
        num_more = len(self._preempted) - len(first)
        turns = self._turns(request.rank, self._tenant_of(request))
        own, spent_s, num_played = turns[0], 0.0, 0
        is_alone = len(turns) == 1
        heapq.heapify(turns)
        while len(first) < most:
            turn = turns[0]
            if turn.num_left:
                found = turn.take()
                first.append(found)
                if not is_alone:
                    prompt_s = cost_s(found)
                    turn.charge(prompt_s)
                    spent_s, num_played = spent_s + prompt_s, num_played + 1
                    heapq.heapreplace(turns, turn)
            elif turn is own:
                return Ahead(first, 0)  # it is the request's turn
            else:
                heapq.heappop(turns)
        num_more += own.num_left
        if not is_alone:
            mean_s = spent_s / num_played if num_played else cost_s(request)
            own.charge(own.num_left * mean_s)
            num_more += sum(turn.num_before(own, mean_s) for turn in turns if turn is not own)
        return Ahead(first, num_more)

    def _turns(self, rank: Rank, tenant: Tenant) -> list["_Turns"]:
        """Return the turns of all tenants, the request's own tenant first."""
        queue, place = self._by_tenant.get(tenant), 0
        if queue is not None:
            place = queue.bisect_key_right(rank)
        own = _Turns(tenant, queue or (), place, is_other=False)
        others = [
            _Turns(other, queue, len(queue), is_other=True)
            for other, queue in self._by_tenant.items()
            if other is not tenant
        ]
        return [own, *others]

    def _least(self) -> Tenant | None:
        while self._heap:
            counter_s, _, tenant = self._heap[0]
            if tenant not in self._by_tenant:
                heapq.heappop(self._heap)
                continue
            if tenant.counter_s == counter_s:
                return tenant
            heapq.heapreplace(self._heap, (tenant.counter_s, next(self._ties), tenant))
        return None

    def _push(self, tenant: Tenant) -> None:
        entry = (tenant.counter_s, next(self._ties), tenant)
        if len(self._heap) > 2 * len(self._by_tenant) + _MOST_STALE:
            # Most entries belong to tenants without a waiting request.
            self._heap = [(one.counter_s, next(self._ties), one) for one in self._by_tenant]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, entry)

    def _first_of(self, tenant: Tenant) -> Request:
        queue = self._by_tenant[tenant]
        place = 0
        if queue[-1].rank[0] == LATE and tenant.late_owed_s > 0.0:
            place = queue.bisect_key_left(_FIRST_LATE)
        first: Request = queue[place]
        return first


def _goes_first(request: Request, tenant: Tenant) -> bool:
    return request.rank[0] == PREEMPTED and not tenant.is_best_effort


def _by_rank() -> SortedKeyList:
    return SortedKeyList(key=attrgetter("rank"))
