"""Requests that wait, tenant by tenant: one of the tenant that has had least goes first."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from operator import attrgetter

from sortedcontainers import SortedKeyList

from legato.core.request import Request
from legato.scheduler.order import LATE, LATE_TURN, PREEMPTED
from legato.scheduler.tenants import Tenant, Tenants

_FIRST_LATE = (LATE, -math.inf)
_MOST_STALE = 16

Rank = tuple[int, float]


def is_lates_turn(tenant: Tenant) -> bool:
    """Whether a tenant's prompts begin with those that are late in the next step."""
    return tenant.num_timely_steps >= LATE_TURN - 1


class FairQueue:
    """Preempted requests, whose streams stand still, go before all others, whosesoever they are.

    No operation takes longer than O(log n) in the number of requests, or of tenants.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._preempted = _by_rank()
        self._by_tenant: dict[str, SortedKeyList] = {}  # none of them empty
        # By counter, equals by turns. Counters only grow: an entry is put right when it comes up.
        self._heap: list[tuple[float, int, str]] = []
        self._ties = itertools.count()

    def add(self, request: Request) -> None:
        """Take in a request by its `rank`."""
        if request.rank[0] == PREEMPTED:
            self._preempted.add(request)
            return
        name = request.message.service.tenant
        queue = self._by_tenant.get(name)
        if queue is None:
            queue = self._by_tenant[name] = _by_rank()
            self._push(name)
        queue.add(request)

    def remove(self, request: Request) -> None:
        """Let go of a request whose `rank` is what it was when it came."""
        if request.rank[0] == PREEMPTED:
            self._preempted.remove(request)
            return
        name = request.message.service.tenant
        queue = self._by_tenant[name]
        queue.remove(request)
        if not queue:
            del self._by_tenant[name]

    def clear(self) -> None:
        self._preempted.clear()
        self._by_tenant.clear()
        self._heap.clear()

    def first(self) -> Request | None:
        if self._preempted:
            first: Request = self._preempted[0]
            return first
        name = self._least()
        return None if name is None else self._first_of(name)

    def least(self) -> Tenant | None:
        """Who has had least of those that wait."""
        name = self._least()
        return None if name is None else self._tenants[name]

    def last_of(self, tenant: Tenant) -> Request | None:
        """Which of a tenant's requests goes last."""
        queue = self._by_tenant.get(tenant.name)
        return queue[-1] if queue else None

    def has_late(self, tenant: Tenant) -> bool:
        queue = self._by_tenant.get(tenant.name)
        return queue is not None and queue[-1].rank[0] == LATE

    def names(self) -> Iterator[str]:
        """Whose requests wait, but for preempted ones."""
        return iter(self._by_tenant)

    def before(
        self, request: Request, rank: Rank, cost_s: Callable[[Request], float]
    ) -> Iterator[Request]:
        """Those that are expected to go before a request that does not wait yet.

        Late ones are left out where it is not: they have turns, and no place in between.

        Args:
            cost_s: what a request's prompt takes, which its tenant's counter grows by.
        """
        yield from self._preempted
        name = request.message.service.tenant
        own = self._by_tenant.get(name)
        ahead = {name: iter(()) if own is None else own.irange_key(None, rank)}
        for other, queue in self._by_tenant.items():
            if other != name:
                ahead[other] = iter(queue)
        if len(ahead) == 1:
            yield from ahead[name]
            return
        heap = [(self._tenants[one].counter_s, one != name, one) for one in ahead]
        heapq.heapify(heap)
        while heap:
            counter_s, is_other, one = heap[0]
            found = next(ahead[one], None)
            if found is not None:
                yield found
                counter_s += cost_s(found) / self._tenants[one].weight
                heapq.heapreplace(heap, (counter_s, is_other, one))
            elif is_other:
                heapq.heappop(heap)
            else:
                return  # it is the request's turn

    def num_before(self, request: Request, rank: Rank) -> int:
        """About how many `before` yields; exactly, where one tenant waits."""
        name = request.message.service.tenant
        own = self._by_tenant.get(name)
        num_own: int = 0 if own is None else own.bisect_key_right(rank)
        share = (num_own + 1) / self._tenants[name].weight
        others = (
            min(len(queue), int(share * self._tenants[other].weight))
            for other, queue in self._by_tenant.items()
            if other != name
        )
        return len(self._preempted) + num_own + sum(others)

    def _least(self) -> str | None:
        while self._heap:
            counter_s, _, name = self._heap[0]
            if name not in self._by_tenant:
                heapq.heappop(self._heap)
                continue
            now_s = self._tenants[name].counter_s
            if now_s == counter_s:
                return name
            heapq.heapreplace(self._heap, (now_s, next(self._ties), name))
        return None

    def _push(self, name: str) -> None:
        entry = (self._tenants[name].counter_s, next(self._ties), name)
        if len(self._heap) > 2 * len(self._by_tenant) + _MOST_STALE:
            # Most are of tenants that have come and gone.
            self._heap = [
                (self._tenants[one].counter_s, next(self._ties), one) for one in self._by_tenant
            ]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, entry)

    def _first_of(self, name: str) -> Request:
        queue = self._by_tenant[name]
        place = 0
        if queue[-1].rank[0] == LATE and is_lates_turn(self._tenants[name]):
            place = queue.bisect_key_left(_FIRST_LATE)
        first: Request = queue[place]
        return first


def _by_rank() -> SortedKeyList:
    return SortedKeyList(key=attrgetter("rank"))
