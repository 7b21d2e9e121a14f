"""Where the requests are: waiting for admission, or running."""

from collections import OrderedDict
from collections.abc import Iterator

from legato.core.request import Request


class Queues:
    """Waiting and running requests, each in order of admission. Every operation is O(1)."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[str, Request] = OrderedDict()  # key request id
        self.running: OrderedDict[str, Request] = OrderedDict()  # key request id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.waiting or request_id in self.running

    def __bool__(self) -> bool:
        return bool(self.waiting or self.running)

    def get(self, request_id: str) -> Request | None:
        return self.running.get(request_id) or self.waiting.get(request_id)

    def add(self, request: Request) -> None:
        self.waiting[request.request_id] = request

    def next_waiting(self) -> Request | None:
        return next(iter(self.waiting.values()), None)

    def admit(self, request: Request) -> None:
        del self.waiting[request.request_id]
        self.running[request.request_id] = request

    def preempt(self, request: Request) -> None:
        """Put a running request back at the head of those waiting."""
        del self.running[request.request_id]
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def last_running(self) -> Request:
        return self.running[next(reversed(self.running))]

    def remove(self, request: Request) -> None:
        self.running.pop(request.request_id, None)
        self.waiting.pop(request.request_id, None)

    def decoding(self) -> Iterator[Request]:
        """Running requests with one token left to compute.

        One that is preempted on the way has more left by then, and is passed over.
        """
        return (r for r in list(self.running.values()) if r.num_remaining_tokens == 1)

    def prefilling(self) -> Iterator[Request]:
        """Running requests with more than one token left to compute."""
        return (r for r in list(self.running.values()) if r.num_remaining_tokens > 1)
