"""Assigns rows of the device's tables to requests."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Slots:
    """Rows [0, count), kept by requests until other requests need them.

    A request that has lost its row gets one again at its next step; a row holds no state of its
    own.

    Args:
        count: at least the requests of the steps in flight and the next step together.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._slots: OrderedDict[str, int] = OrderedDict()  # ordered by their last step
        self._free = list(reversed(range(count)))

    def take(self, request_ids: Sequence[str]) -> list[int]:
        """Return a row for each request of a step; there are at most `count` requests."""
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
        """Take back the rows of ended requests; requests without a row are ignored."""
        for request_id in request_ids:
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._free.append(slot)
