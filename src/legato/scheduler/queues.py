"""Where the requests are: waiting for admission, or running."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter

from sortedcontainers import SortedKeyList

from legato.core.request import Request
from legato.scheduler.order import Order, is_past_deadline, rank


class Queues:
    """Running requests in order of admission, waiting ones by rank.

    Best-effort requests wait apart from those with a promise. No operation takes longer than
    O(log n) in the number waiting.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.running: OrderedDict[str, Request] = OrderedDict()  # key request id
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # key request id
        # Key: is best-effort; equal ranks in the order they came.
        self._by_rank = {is_: SortedKeyList(key=attrgetter("rank")) for is_ in (False, True)}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting or request_id in self.running

    def __bool__(self) -> bool:
        return bool(self._waiting or self.running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def get(self, request_id: str) -> Request | None:
        return self.running.get(request_id) or self._waiting.get(request_id)

    def add(self, request: Request) -> None:
        """Let a request wait, at the place that its rank now gives it."""
        request.rank = rank(request, self.order)
        self._waiting[request.request_id] = request
        self._by_rank[request.is_best_effort].add(request)

    def next_waiting(self, *, best_effort: bool) -> Request | None:
        queue = self._by_rank[best_effort]
        return queue[0] if queue else None

    def waiting_before(self, request: Request) -> Iterator[Request]:
        """Those that wait with a promise and would go before a request that is about to."""
        yield from self._by_rank[False].irange_key(None, rank(request, self.order))

    def num_waiting_before(self, request: Request) -> int:
        """How many `waiting_before` yields."""
        position: int = self._by_rank[False].bisect_key_right(rank(request, self.order))
        return position

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
        for queue in self._by_rank.values():
            queue.clear()
        return waiting

    def rerank(self, request: Request) -> None:
        """Give a waiting request the place that its rank has come to be."""
        self._leave(request)
        self.add(request)

    def demote_late(self, now_s: float) -> None:
        """Let the requests whose deadline has passed go behind those that can make it."""
        for begun in self.running.values():
            if begun.first_token_s is None and is_past_deadline(begun, now_s):
                begun.is_late = True
        while (request := self.next_waiting(best_effort=False)) and is_past_deadline(
            request, now_s
        ):
            request.is_late = True
            self.rerank(request)

    def admit(self, request: Request) -> None:
        self._leave(request)
        self.running[request.request_id] = request

    def preempt(self, request: Request) -> None:
        """Put a running request back, before those that have not run yet."""
        del self.running[request.request_id]
        self.add(request)

    def last_running(self, accept: Callable[[Request], bool]) -> Request | None:
        """The latest admitted of those that `accept` is true for."""
        return next(filter(accept, reversed(self.running.values())), None)

    def remove(self, request: Request) -> None:
        if self.running.pop(request.request_id, None) is None:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        del self._waiting[request.request_id]
        self._by_rank[request.is_best_effort].remove(request)
