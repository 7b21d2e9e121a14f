"""The block tables of requests, over one pool and one prefix tree."""

from collections import deque
from collections.abc import Iterator, Mapping

from legato.kv.block_ids import BlockIds, block_array
from legato.kv.block_pool import BlockPool
from legato.kv.host_cache_slots import HostCacheSlots
from legato.kv.prefix_node import Node, SoughtTokens, Way
from legato.kv.prefix_tree import PrefixTree


class BlockTable:
    """Blocks of one request: the first `num_shared` are in the tree, the rest are its own.

    Attributes:
        last: node of the last shared block; the tree's root if no block is shared.
        block_ids: all blocks, in token order. Steps in flight refer to this array, so a change
            makes another array.
        num_full: blocks from the start on that the request has found to be computed.
    """

    __slots__ = ("block_ids", "last", "num_full", "num_shared")

    def __init__(self, last: Node, num_shared: int, block_ids: BlockIds) -> None:
        self.last = last
        self.num_shared = num_shared
        self.block_ids = block_ids
        self.num_full = 0


class BlockTables:
    """Gives blocks to requests and takes them back. A block is free, in the tree, or one request's.

    Blocks let go while steps are in flight become free when the last step that may name them has
    landed (`begin_step`, `end_step`).

    Attributes:
        num_ended: steps that have landed, or will not be computed.
    """

    def __init__(self, pool: BlockPool, tree: PrefixTree, host: HostCacheSlots) -> None:
        self._pool = pool
        self._tree = tree
        self._host = host
        self._tables: dict[str, BlockTable] = {}  # key request id
        self._num_begun = self.num_ended = 0  # steps
        # (last step that names them, blocks)
        self._leaving: deque[tuple[int, BlockTable]] = deque()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def __getitem__(self, request_id: str) -> BlockTable:
        return self._tables[request_id]

    def __iter__(self) -> Iterator[BlockTable]:
        """Iterate over the tables of all requests, and tables let go that a step may name."""
        yield from self._tables.values()
        yield from (table for _, table in self._leaving)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request uses; the cached ones among them are evicted when needed."""
        return self._pool.num_free + self._tree.num_unused

    @property
    def last_step(self) -> int | None:
        """Number of the last step in flight; None if there is none."""
        return None if self._num_begun == self.num_ended else self._num_begun

    def begin_step(self) -> None:
        """Record a planned step, which names the present blocks of requests."""
        self._num_begun += 1

    def end_step(self, *, and_later: bool = False) -> None:
        """Record that the oldest step in flight, or each, has landed or will not be computed."""
        self.num_ended = self._num_begun if and_later else self.num_ended + 1
        while self._leaving and self._leaving[0][0] <= self.num_ended:
            self._free(self._leaving.popleft()[1])

    def own(self, block_ids: BlockIds) -> BlockTable:
        """Make a table of blocks that are not in the tree."""
        return BlockTable(self._tree.root, 0, block_ids)

    def add(self, request_id: str, table: BlockTable) -> None:
        """Give a request its table."""
        self._tables[request_id] = table

    def release(self, request_id: str) -> bool:
        """Let go of a request's table; return whether it had one."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.let_go(table)
        return table is not None

    def grow(self, table: BlockTable, count: int) -> bool:
        """Add `count` own blocks to a table; False if too few are free."""
        if count > self.num_free_blocks:
            return False
        num_fresh = min(count, self._pool.num_free)
        if num_fresh:
            last = table.block_ids[-1] if table.block_ids else None
            fresh = self._pool.allocate(num_fresh, after=last)
            assert fresh is not None
            table.block_ids = table.block_ids + block_array(fresh)
        if count > num_fresh:
            # The blocks of one request are adjacent, though the last one is evicted first.
            evicted = sorted(self._tree.evict(count - num_fresh))
            table.block_ids = table.block_ids + block_array(evicted)
        return True

    def share(self, table: BlockTable, sought: SoughtTokens, num_full: int) -> None:
        """Put a table's own blocks up to `num_full`, which are computed, into the tree.

        If another request was faster, its blocks replace these. A block of it that is still to be
        computed cannot, so this request keeps its own block and those after it.

        Args:
            sought: the request's tokens.
        """
        end = num_full * sought.block_size
        twins = self._tree.match(sought, end, below=table.last)
        if twins.nodes:
            num_tokens = twins.num_computed_tokens // sought.block_size * sought.block_size
            self.take_over(table, twins.up_to(num_tokens), is_computed=True)
            if num_tokens < twins.num_tokens:
                return
        added = table.block_ids[table.num_shared : num_full]
        if added:
            table.last = self._tree.extend(table.last, sought, added, num_missing=0)
            table.num_shared = num_full

    def take_over(self, table: BlockTable, twins: Way, *, is_computed: bool) -> None:
        """Replace a table's own blocks by computed blocks of the tree with the same tokens.

        Args:
            twins: the blocks of the tree, from the end of the table's shared blocks on.
            is_computed: whether the own blocks are computed, too.
        """
        for node in self._tree.use(twins):
            taken = node.blocks
            own = table.block_ids[taken]
            table.last, table.num_shared = node, taken.stop
            if node.is_spilled:
                (self._host.replace if is_computed else self._host.restore)(node, own)
                continue
            before, after = table.block_ids[: taken.start], table.block_ids[taken.stop :]
            table.block_ids = before + node.places + after
            self.let_go(self.own(own))

    def let_go(self, table: BlockTable) -> None:
        """Free a table's own blocks, and end its use of shared ones, after the steps in flight."""
        last_step = self.last_step
        if last_step is None:
            self._free(table)
        else:
            self._leaving.append((last_step, table))

    def rename(self, replaced: Mapping[int, int]) -> None:
        """Replace blocks by others in all tables; key and value are block ids."""
        for table in self:
            table.block_ids = renamed(table.block_ids, replaced)

    def _free(self, table: BlockTable) -> None:
        own = table.block_ids[table.num_shared :]
        self._pool.free([*own, *self._tree.release(table.last)])


def renamed(block_ids: BlockIds, replaced: Mapping[int, int]) -> BlockIds:
    """Return a table with some of its blocks replaced; the same one if it has none of them."""
    if replaced.keys().isdisjoint(block_ids):
        return block_ids
    return block_array(replaced.get(block_id, block_id) for block_id in block_ids)
