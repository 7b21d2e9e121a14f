"""Truncates conversations that are too long at their beginning."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from legato.server.requests.response_items import Item, MessageItem, Placed


def truncated(items: Sequence[Placed], fits: Callable[[Sequence[Placed]], bool]) -> list[Placed]:
    """Drop as few of the first turns as needed; the last turn always stays.

    A turn begins with a user's message, so that no tool's output remains without its call. System
    messages stay.

    Args:
        fits: if true of some items, it is also true of fewer.
    """
    begins = [i for i, (_, item) in enumerate(items) if _is_of(item, "user")]
    cuts = begins if begins[:1] == [0] else [0, *begins]
    first = bisect_left(cuts[:-1], True, key=lambda cut: fits(_from(items, cut)))
    return _from(items, cuts[first])


def _from(items: Sequence[Placed], cut: int) -> list[Placed]:
    told = [placed for placed in items[:cut] if _is_of(placed[1], "system", "developer")]
    return [*told, *items[cut:]]


def _is_of(item: Item, *roles: str) -> bool:
    return isinstance(item, MessageItem) and item.role in roles
