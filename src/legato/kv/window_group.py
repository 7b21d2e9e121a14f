"""Blocks of the layers with one sliding window: a request keeps the last few.

A block is let go once no later query reads it. It stays cached as the window group's copy of a
block of the prefix tree, under the key of that block: the tree's blocks belong to the layers that
keep all tokens, and each stands for all tokens from a prompt's start on. With swap space, copies
that are evicted go to the host's memory, wherever the block itself is.

A hit needs all blocks that the window reaches at its end, and prompts rarely part in the middle of
another: blocks before the end of a prompt, of a request, or of what two prompts share, are evicted
after all others.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from legato.kv.block_ids import BlockIds, block_array
from legato.kv.block_pool import BlockPool
from legato.kv.cache_events import CacheEvents
from legato.kv.spilled_copies import SpilledCopies


class _Table:
    """Blocks of one request.

    Attributes:
        block_ids: entry i is the block of tokens [i * block_size, (i + 1) * block_size), and 0
            before `first`. Steps in flight refer to this array, so a change makes another array.
        first: index of the first block that a later query reads.
        worth_keeping: indices of blocks that other requests may need.
    """

    __slots__ = ("block_ids", "first", "worth_keeping")

    def __init__(self, block_ids: BlockIds, first: int, worth_keeping: Sequence[range]) -> None:
        self.block_ids = block_ids
        self.first = first
        self.worth_keeping = worth_keeping


class WindowGroup:
    """Block tables over a pool of their own.

    A block is free, one request's own, or cached. A cached block may have users, and can be evicted
    without them.

    Args:
        window: keys visible to a query, also an attribute.
        num_blocks: size of the pool, also an attribute.
        num_host_slots: evicted blocks that host memory can keep.
        num_spare: blocks that running requests never need, also an attribute.

    Attributes:
        spilled: evicted blocks in host memory.
    """

    def __init__(
        self,
        window: int,
        num_blocks: int,
        block_size: int,
        *,
        num_host_slots: int = 0,
        num_spare: int = 0,
    ) -> None:
        self.window = window
        self.num_blocks = num_blocks
        self.num_spare = num_spare
        self._num_held = 0
        self.spilled = SpilledCopies(num_host_slots)
        self._block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[str, _Table] = {}  # key request id
        self._cached: dict[int, int] = {}  # key a key of the tree, value a block of this group
        self._key_of: dict[int, int] = {}  # the other way round
        self._num_users: dict[int, int] = {}  # key cached block
        # Cached blocks without users, least recently used first: those at no end, then the others.
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._worth_keeping: set[int] = set()  # cached blocks
        self._events = CacheEvents()

    def report_to(self, events: CacheEvents) -> None:
        """Report the copies that come and go to a journal, as ends of hits depend on them."""
        self._events = events

    def __contains__(self, key: object) -> bool:
        """Whether a block of the tree has a copy, here or in host memory."""
        return key in self._cached or key in self.spilled

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request uses; the cached ones among them are evicted when needed."""
        return self._pool.num_free + self.num_cached_blocks

    @property
    def num_empty_blocks(self) -> int:
        """Blocks that no request uses and that are not cached."""
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no request uses, kept for later requests."""
        return len(self._passed) + len(self._unused)

    @property
    def num_visible_blocks(self) -> int:
        """Blocks before a block's first token that a query there reads."""
        return -(-(self.window - 1) // self._block_size)

    def num_hit_blocks(self, keys: BlockIds, num_blocks: int) -> int:
        """Return after how many blocks, at most `num_blocks`, a request could begin.

        Args:
            keys: keys of the tree's blocks of its prompt.
        """
        end, cached, spilled = num_blocks, self._cached, self.spilled
        while end > 0:
            visible = range(max(0, end - self.num_visible_blocks), end)
            absent = [i for i in visible if keys[i] not in cached]
            missing = next((i for i in absent if keys[i] not in spilled), None)
            if missing is None and absent and not self._has_room(keys[visible.start : end]):
                missing = absent[0]
            if missing is None:
                break
            end = missing  # all ends in between need this block, too
        return end

    def _has_room(self, keys: BlockIds) -> bool:
        """Whether the spilled ones among some blocks would find blocks beside the others."""
        here = [self._cached[key] for key in keys if key in self._cached]
        num_free = self.num_free_blocks - sum(not self._num_users[block_id] for block_id in here)
        return len(keys) - len(here) <= num_free

    def begin(self, request_id: str, keys: BlockIds, ends: Iterable[int]) -> None:
        """Make the table of a request that begins after the tree's blocks `keys`.

        Args:
            keys: as many as `num_hit_blocks` returned, with their keys from now on.
            ends: numbers of blocks after which other requests are likely to begin.
        """
        num_visible = self.num_visible_blocks
        first = max(0, len(keys) - num_visible)
        visible = keys[first:]
        for block_id in [self._cached[key] for key in visible if key in self._cached]:
            self._use(block_id)
        self._restore([key for key in visible if key not in self._cached])
        found = block_array(self._cached[key] for key in visible)
        worth_keeping = [range(end - num_visible, end) for end in ends]
        self._tables[request_id] = _Table(block_array((0,)) * first + found, first, worth_keeping)

    def num_missing(self, request_id: str, num_blocks: int) -> int:
        """Return how many blocks a table of `num_blocks` blocks still needs."""
        return max(0, num_blocks - len(self._tables[request_id].block_ids))

    def grow(self, request_id: str, count: int) -> None:
        """Add `count` own blocks to a table; as many must be free."""
        table = self._tables[request_id]
        last = table.block_ids[-1] if len(table.block_ids) > table.first else None
        table.block_ids = table.block_ids + block_array(self._take(count, after=last))

    def table(self, request_id: str) -> BlockIds:
        """Return a request's block table; entries that no later query reads are 0."""
        return self._tables[request_id].block_ids

    def share(self, request_id: str, keys: BlockIds, start: int, end: int) -> None:
        """Cache a request's blocks [start, end), which are computed, under blocks of the tree."""
        table = self._tables[request_id]
        for i in range(max(start, table.first), end):
            key, block_id = keys[i], table.block_ids[i]
            if key not in self._cached and block_id not in self._key_of:
                self.spilled.forget(key)
                self._cache(key, block_id)

    def take_passed(self, request_id: str, num_tokens: int) -> BlockIds:
        """Take the blocks out of a table that no query from token `num_tokens` on reads."""
        table = self._tables[request_id]
        first = max(0, num_tokens + 1 - self.window) // self._block_size
        if first <= table.first:
            return block_array()
        passed = table.block_ids[table.first : first]
        for i, block_id in enumerate(passed, table.first):
            if any(i in kept for kept in table.worth_keeping):
                self._keep(block_id)
        table.block_ids = block_array((0,)) * first + table.block_ids[first:]
        table.first = first
        return passed

    def take_all(self, request_id: str) -> BlockIds:
        """Remove a request's table; return its blocks."""
        table = self._tables.pop(request_id)
        blocks = table.block_ids[table.first :]
        for block_id in blocks:
            self._keep(block_id)
        return blocks

    def let_go(self, block_ids: BlockIds) -> None:
        """Give up blocks that were taken out of a table."""
        own = [block_id for block_id in block_ids if block_id not in self._num_users]
        self._pool.free(own)
        for block_id in block_ids:
            if block_id in self._num_users:
                self._num_users[block_id] -= 1
                if not self._num_users[block_id]:
                    is_at_end = block_id in self._worth_keeping
                    (self._unused if is_at_end else self._passed)[block_id] = None

    def borrow(self) -> list[int]:
        """Take all empty blocks."""
        return self._pool.allocate(self._pool.num_free) or []

    def give_back(self, block_ids: list[int]) -> None:
        """Undo `borrow`."""
        self._pool.free(block_ids)

    def hold(self, keys: BlockIds) -> BlockIds | None:
        """Keep the blocks that a hit after the tree's blocks `keys` needs; None if it cannot."""
        first = max(0, len(keys) - self.num_visible_blocks)
        held = block_array(self._cached[key] for key in keys[first:] if key in self._cached)
        if len(held) < len(keys) - first or self._num_held + len(held) > self.num_spare:
            return None
        for block_id in held:
            self._use(block_id)
        self._num_held += len(held)
        return held

    def receive(self, num_blocks: int) -> BlockIds | None:
        """Take blocks for what a hit after so many blocks needs; None if there are too few."""
        count = min(self.num_visible_blocks, num_blocks)
        if self._num_held + count > self.num_spare or count > self.num_free_blocks:
            return None
        self._num_held += count
        return block_array(self._take(count))

    def keep(self, keys: BlockIds, received: BlockIds) -> None:
        """Cache received blocks under the last blocks of the tree's `keys`, if these have none."""
        first = len(keys) - len(received)
        for key, block_id in zip(keys[first:], received, strict=True):
            if key not in self._cached:
                self.spilled.forget(key)
                self._cache(key, block_id)
                self._worth_keeping.add(block_id)

    def end_hold(self, block_ids: BlockIds) -> None:
        """Undo `hold` or `receive`."""
        self._num_held -= len(block_ids)
        self.let_go(block_ids)

    def rename(self, keys: Iterable[int], new_keys: Iterable[int]) -> None:
        """Record other keys of blocks of the tree."""
        for key, new_key in zip(keys, new_keys, strict=True):
            if key in self._cached:
                block_id = self._cached[new_key] = self._cached.pop(key)
                self._key_of[block_id] = new_key
            self.spilled.rename(key, new_key)

    def forget(self, keys: Iterable[int]) -> None:
        """Free the copies of blocks that leave the tree; no request uses them."""
        for key in keys:
            if key in self._cached:
                self._evict(self._cached[key])
            self.spilled.forget(key)

    def _take(self, count: int, *, after: int | None = None) -> list[int]:
        """Take blocks, evicting cached ones if need be; as many must be free."""
        while count > self._pool.num_free:
            block_id = next(iter(self._passed or self._unused))
            if self.spilled.num_slots and block_id in self._unused:
                dropped = self.spilled.spill(self._key_of[block_id], block_id)
                if dropped is not None:
                    self._events.ends_changed(dropped)
            self._evict(block_id)
        fresh = self._pool.allocate(count, after=after)
        assert fresh is not None
        return fresh

    def _restore(self, keys: Sequence[int]) -> None:
        """Bring copies back from the host, for a request that begins after them."""
        if not keys:
            return
        slots = [self.spilled.take(key) for key in keys]
        for key, slot, block_id in zip(keys, slots, self._take(len(keys)), strict=True):
            self.spilled.restore(slot, block_id)
            self._cache(key, block_id)
            self._worth_keeping.add(block_id)

    def _use(self, block_id: int) -> None:
        """Add a user to a cached block."""
        self._num_users[block_id] += 1
        self._passed.pop(block_id, None)
        self._unused.pop(block_id, None)

    def _cache(self, key: int, block_id: int) -> None:
        """Cache a request's block, which is its user."""
        self._cached[key] = block_id
        self._key_of[block_id] = key
        self._num_users[block_id] = 1
        self._events.ends_changed(key)

    def _keep(self, block_id: int) -> None:
        if block_id in self._num_users:
            self._worth_keeping.add(block_id)

    def _evict(self, block_id: int) -> None:
        self._passed.pop(block_id, None)
        self._unused.pop(block_id, None)
        self._worth_keeping.discard(block_id)
        del self._num_users[block_id]
        key = self._key_of.pop(block_id)
        del self._cached[key]
        self._events.ends_changed(key)
        self._pool.free([block_id])
