"""All window groups of a cache, as the KV manager sees them."""

from collections import deque
from collections.abc import Iterable, Sequence

from legato.core.plan import BlockMove
from legato.kv.block_ids import BlockIds, block_array
from legato.kv.cache_events import CacheEvents
from legato.kv.prefix_node import Way
from legato.kv.window_group import WindowGroup


class WindowGroups:
    """Keeps the blocks that windows still reach, for a bounded number of requests.

    Each pool holds the most blocks that so many requests can need, so that a request that was
    admitted never lacks a block, except while steps in flight keep blocks of ended requests.

    Args:
        groups: in the order of `ScheduledChunk.window_block_ids`.
        max_requests: requests that may have blocks at a time.
    """

    def __init__(
        self, groups: Sequence[WindowGroup], *, block_size: int, max_requests: int
    ) -> None:
        self.groups = tuple(groups)
        self._block_size = block_size
        self._max_requests = max_requests
        self._running: set[str] = set()  # request ids
        # (last step that names them, blocks of each group)
        self._leaving: deque[tuple[int, list[BlockIds]]] = deque()

    def report_to(self, events: CacheEvents) -> None:
        """Report copies that come and go to a journal; see `WindowGroup`."""
        for group in self.groups:
            group.report_to(events)

    @property
    def has_place(self) -> bool:
        """Whether one more request may have blocks."""
        return len(self._running) < self._max_requests

    @property
    def usage(self) -> dict[int, float]:
        """Fraction of the blocks that requests use, in [0, 1]; key a window in tokens.

        Of groups with the same window, whose layers differ, the fullest counts.
        """
        usage: dict[int, float] = {}
        for group in self.groups:
            used = 1.0 - group.num_free_blocks / group.num_blocks
            usage[group.window] = max(used, usage.get(group.window, 0.0))
        return usage

    def cut(self, way: Way) -> Way:
        """Cut a path of the tree to the tokens after which all windows find their blocks."""
        keys = block_array()
        for node in way.nodes:
            keys += node.block_keys()
        before, end = -1, way.num_tokens // self._block_size
        while end != before:
            before = end
            for group in self.groups:
                end = group.num_hit_blocks(keys, end)
        return way.up_to(end * self._block_size)

    def begin(self, request_id: str, keys: BlockIds, ends: Iterable[int]) -> None:
        """Give a request the blocks that its windows reach, after a path that `cut` returned.

        Args:
            keys: blocks of the path.
            ends: numbers of blocks after which other requests are likely to begin.
        """
        self._running.add(request_id)
        for group in self.groups:
            group.begin(request_id, keys, ends)

    def grow(self, request_id: str, num_blocks: int) -> bool:
        """Make room for a request's first `num_blocks` blocks of tokens, in all groups or in none.

        Returns:
            whether there were enough free blocks.
        """
        missing = [group.num_missing(request_id, num_blocks) for group in self.groups]
        if any(count > g.num_free_blocks for count, g in zip(missing, self.groups, strict=True)):
            return False
        for count, group in zip(missing, self.groups, strict=True):
            if count:
                group.grow(request_id, count)
        return True

    def num_blocks_of(self, request_id: str) -> int:
        """Return how many of a request's first blocks all its tables have."""
        return min(len(table) for table in self.tables(request_id))

    def tables(self, request_id: str) -> tuple[BlockIds, ...]:
        """Return a request's block table in each group."""
        return tuple(group.table(request_id) for group in self.groups)

    def share(self, request_id: str, keys: BlockIds, start: int, end: int) -> None:
        """Cache a request's computed blocks [start, end), as copies of blocks of the tree.

        Args:
            keys: the request's blocks in the tree.
        """
        for group in self.groups:
            group.share(request_id, keys, start, end)

    def advance(self, request_id: str, num_tokens: int, last_step: int | None) -> None:
        """Let go of the blocks that windows have passed once `num_tokens` tokens are computed.

        Args:
            last_step: the last step in flight, which may name the blocks; None if there is none.
        """
        passed = [group.take_passed(request_id, num_tokens) for group in self.groups]
        if any(passed):
            self._let_go(passed, last_step)

    def release(self, request_id: str, last_step: int | None) -> None:
        """Let go of all blocks of a request; `last_step` is as in `advance`."""
        self._running.remove(request_id)
        self._let_go([group.take_all(request_id) for group in self.groups], last_step)

    def end_steps(self, num_ended: int) -> None:
        """Free the blocks that no step names any more, once `num_ended` steps have landed."""
        while self._leaving and self._leaving[0][0] <= num_ended:
            self._let_go(self._leaving.popleft()[1], None)

    @property
    def can_lend(self) -> bool:
        """Whether each group has as many empty blocks as a window reaches, and one more."""
        return all(group.num_empty_blocks > group.num_visible_blocks for group in self.groups)

    def borrow(self) -> tuple[list[int], ...]:
        """Take all empty blocks of each group; see `KVCacheManager.borrow`."""
        return tuple(group.borrow() for group in self.groups)

    def give_back(self, borrowed: Iterable[list[int]]) -> None:
        """Undo `borrow`."""
        for group, block_ids in zip(self.groups, borrowed, strict=True):
            group.give_back(block_ids)

    def hold(self, keys: BlockIds) -> tuple[BlockIds, ...] | None:
        """Keep what a hit after the tree's blocks `keys` needs, for a transfer; None if it cannot.

        Only blocks that running requests never need are kept from them.
        """
        return self._in_all([group.hold(keys) for group in self.groups])

    def receive(self, num_blocks: int) -> tuple[BlockIds, ...] | None:
        """Take blocks for what a hit after so many blocks needs; None if there are too few."""
        return self._in_all([group.receive(num_blocks) for group in self.groups])

    def keep(self, keys: BlockIds, received: Iterable[BlockIds]) -> None:
        """Cache received blocks, as copies of the last of the tree's blocks `keys`."""
        for group, block_ids in zip(self.groups, received, strict=True):
            group.keep(keys, block_ids)

    def end_hold(self, held: Iterable[BlockIds]) -> None:
        """Undo `hold` or `receive`."""
        for group, block_ids in zip(self.groups, held, strict=True):
            group.end_hold(block_ids)

    def _in_all(self, held: list[BlockIds | None]) -> tuple[BlockIds, ...] | None:
        taken = tuple(block_ids for block_ids in held if block_ids is not None)
        if len(taken) == len(held):
            return taken
        for group, block_ids in zip(self.groups, held, strict=True):
            if block_ids is not None:
                group.end_hold(block_ids)
        return None

    def take_moves(self) -> list[BlockMove]:
        """Return the copies to and from the host's memory to make, in order, before the step."""
        return [
            move for i, group in enumerate(self.groups, 1) for move in group.spilled.take_moves(i)
        ]

    def rename(self, keys: Sequence[int], new_keys: Sequence[int]) -> None:
        """Record other keys of blocks of the tree."""
        for group in self.groups:
            group.rename(keys, new_keys)

    def forget(self, keys: Iterable[int]) -> None:
        """Free the copies of blocks that leave the tree."""
        for group in self.groups:
            group.forget(keys)

    def _let_go(self, blocks: list[BlockIds], last_step: int | None) -> None:
        if last_step is not None:
            self._leaving.append((last_step, blocks))
            return
        for group, block_ids in zip(self.groups, blocks, strict=True):
            group.let_go(block_ids)
