"""Items that wait under keys, such as tenants: the keys take turns."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


def _any_key(key: str) -> bool:  # noqa: ARG001
    return True


class Rotation(Generic[_Item]):
    """Gives one item of each key in turn, and items of one key in order of arrival.

    Adding and taking an item are O(1) in the number of items.
    """

    def __init__(self) -> None:
        # Value never empty; the key with the next turn stands first.
        self._queues: OrderedDict[str, deque[_Item]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, key: str, item: _Item) -> None:
        """Add an item after all others of its key."""
        self._queues.setdefault(key, deque()).append(item)

    def take(self, accepts: Callable[[str], bool] = _any_key) -> _Item | None:
        """Remove and return the item whose turn it is; None if no accepted key has one.

        Args:
            accepts: whether a key may have a turn now.
        """
        key = next(filter(accepts, self._queues), None)
        if key is None:
            return None
        queue = self._queues[key]
        item = queue.popleft()
        if queue:
            self._queues.move_to_end(key)
        else:
            del self._queues[key]
        return item
