"""Waiting requests by tenant: the tenant with the least service goes first."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from sortedcontainers import SortedKeyList

from legato.core.request import Request
from legato.scheduler.order import LATE, LATE_TURN, PREEMPTED
from legato.scheduler.tenants import Tenant, Tenants

_FIRST_LATE = (LATE, -math.inf)
_MOST_STALE = 16

Rank = tuple[int, float]


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


def is_turn_of_late(tenant: Tenant) -> bool:
    """Whether the tenant's late requests go first in the next step."""
    return tenant.num_timely_steps >= LATE_TURN - 1


class FairQueue:
    """Queue of waiting requests.

    Preempted requests go before all others, whichever tenant owns them: their streams stand still.
    No operation takes longer than O(log n) in the number of requests, or of tenants.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._preempted = _by_rank()
        self._by_tenant: dict[str, SortedKeyList] = {}  # no queue is empty
        # (counter, tie, tenant). Counters only grow: a stale entry is corrected at the top.
        self._heap: list[tuple[float, int, str]] = []
        self._ties = itertools.count()

    def add(self, request: Request) -> None:
        """Add a request at its `rank`."""
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
        """Remove a request, whose `rank` must not have changed since `add`."""
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

    @property
    def preempted(self) -> Sequence[Request]:
        """The preempted requests, the next one first."""
        preempted: Sequence[Request] = self._preempted
        return preempted

    def first(self) -> Request | None:
        if self._preempted:
            first: Request = self._preempted[0]
            return first
        name = self._least()
        return None if name is None else self._first_of(name)

    def least(self) -> Tenant | None:
        """Return the waiting tenant with the least service."""
        name = self._least()
        return None if name is None else self._tenants[name]

    def lines(self) -> Iterator[tuple[Tenant, Sequence[Request]]]:
        """Yield each tenant's requests except preempted ones, the next one first."""
        for name, queue in self._by_tenant.items():
            yield self._tenants[name], queue

    def has_late(self, tenant: Tenant) -> bool:
        queue = self._by_tenant.get(tenant.name)
        return queue is not None and queue[-1].rank[0] == LATE

    def ahead(
        self, request: Request, rank: Rank, cost_s: Callable[[Request], float], most: int
    ) -> Ahead:
        """Return the requests expected to go before a request that is not queued yet.

        Its tenant's late requests are left out unless it is late itself: they have turns, not
        places in the order.

        Args:
            cost_s: seconds of a request's prompt, which its tenant is charged.
            most: requests to return one by one, at least 1.
        """
        first: list[Request] = [*itertools.islice(self._preempted, most)]
        num_more = len(self._preempted) - len(first)
        turns = self._turns(request, rank)
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

    def _turns(self, request: Request, rank: Rank) -> list["_Turns"]:
        """Return the turns of all tenants, the request's own tenant first."""
        name = request.message.service.tenant
        queue, place = self._by_tenant.get(name), 0
        if queue is not None:
            place = queue.bisect_key_right(rank)
        own = _Turns(self._tenants[name], queue or (), place, is_other=False)
        others = [
            _Turns(self._tenants[other], queue, len(queue), is_other=True)
            for other, queue in self._by_tenant.items()
            if other != name
        ]
        return [own, *others]

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
            # Most entries belong to tenants without a waiting request.
            self._heap = [
                (self._tenants[one].counter_s, next(self._ties), one) for one in self._by_tenant
            ]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, entry)

    def _first_of(self, name: str) -> Request:
        queue = self._by_tenant[name]
        place = 0
        if queue[-1].rank[0] == LATE and is_turn_of_late(self._tenants[name]):
            place = queue.bisect_key_left(_FIRST_LATE)
        first: Request = queue[place]
        return first


def _by_rank() -> SortedKeyList:
    return SortedKeyList(key=attrgetter("rank"))
