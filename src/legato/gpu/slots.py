"""Which row of the device's tables a request has."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Slots:
    """Rows [0, count), lent to requests for as long as nobody else needs them.

    A request whose row was given to another gets one again when it is next in a step, and that
    holds nothing of its own.

    Args:
        count: as many as the steps in flight and the next may have requests together.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._slots: OrderedDict[str, int] = OrderedDict()  # by when they were last in a step
        self._free = list(reversed(range(count)))

    def take(self, request_ids: Sequence[str]) -> list[int]:
        """A row for each request of a step, no more of them than there are rows."""
        assert len(request_ids) <= self.count
        slots = self._slots
        for request_id in request_ids:
            if request_id in slots:
                slots.move_to_end(request_id)
        for request_id in request_ids:
            if request_id not in slots:
                slots[request_id] = self._free.pop() if self._free else slots.popitem(last=False)[1]
        return [slots[request_id] for request_id in request_ids]

    def drop(self, request_ids: Iterable[str]) -> None:
        """Have rows back of requests that have ended, those of others being ignored."""
        for request_id in request_ids:
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._free.append(slot)
