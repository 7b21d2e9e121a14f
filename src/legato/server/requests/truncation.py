"""Conversations that are too long, without their beginning."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from legato.server.requests.response_items import Item, MessageItem, Placed


def truncated(items: Sequence[Placed], fits: Callable[[Sequence[Placed]], bool]) -> list[Placed]:
    """The items without as few of the first turns as it takes, or with the last turn alone.

    A turn begins with a message of the user's, so that no tool's output is there without its call.
    What the system says stays.

    Args:
        fits: is the sooner true, the fewer they are.
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
