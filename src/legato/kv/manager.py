"""Which blocks hold each request's keys and values, and which of them requests share."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from legato.core.block_ids import BlockIds, block_array
from legato.core.kv_events import KVEvent
from legato.core.plan import BlockMove
from legato.core.request import Request
from legato.kv.block_pool import BlockPool
from legato.kv.cache_events import CacheEvents
from legato.kv.hold import Hold
from legato.kv.host_pool import HostPool
from legato.kv.prefix_node import Node, SoughtTokens, Way
from legato.kv.prefix_tree import PrefixTree


class _Table:
    """Blocks of one request: those up to `num_shared` are in the tree, the rest are its own.

    Attributes:
        last: the node that the last shared one is in; the tree's root where there is none.
        block_ids: all of them, in token order. What steps in flight name is never changed: other
            blocks are another array.
        num_full: blocks from the start on that the request has found to be computed.
    """

    __slots__ = ("block_ids", "last", "num_full", "num_shared")

    def __init__(self, last: Node, num_shared: int, block_ids: BlockIds) -> None:
        self.last = last
        self.num_shared = num_shared
        self.block_ids = block_ids
        self.num_full = 0


class KVCacheManager:
    """Block tables over one pool, and a tree of the blocks that may be shared.

    A block is free, in the tree, or one request's own. All blocks of a prompt are in the tree from
    its admission on, before they are computed, so that a request with the same prompt has the same
    blocks and finds computed what the first one has computed so far. The block of the last token
    is the request's own: that token is computed in any case, since what follows is sampled from
    it, and nothing is ever written to a block that is computed. Once it is full, it joins the tree.

    What is let go of while steps are in flight comes free when the last step that may name it has
    landed (`begin_step`, `end_step`).

    Args:
        enable_prefix_caching: False shares nothing and keeps nothing.
        num_host_slots: blocks that are kept in host memory when they are evicted.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_host_slots: int = 0,
    ) -> None:
        self.block_size = block_size
        self._is_sharing = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._events = CacheEvents()
        self._host = HostPool(num_host_slots, self._events)
        self._tree = PrefixTree(self._host, self._events)
        self._tables: dict[str, _Table] = {}  # key request id
        self._num_begun = self._num_ended = 0  # steps
        self._leaving: deque[tuple[int, _Table]] = deque()  # (number of the last step, what it has)
        self._holds: dict[str, Hold] = {}  # key request id
        self._new_holds: list[Hold] = []
        self._arriving: set[int] = set()  # blocks
        # Key request id, value blocks that its transfer may still write to, and no request has.
        self._quarantined: dict[str, BlockIds] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_host_slots(self) -> int:
        return self._host.num_slots

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request uses; the cached ones among them are evicted when needed."""
        return self._pool.num_free + self._tree.num_unused

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no request uses, kept for those to come."""
        return self._tree.num_unused

    @property
    def usage(self) -> float:
        """Fraction of the blocks that requests use, in [0, 1]."""
        return 1.0 - self.num_free_blocks / self._pool.num_blocks

    def match(self, request: Request) -> Way:
        """What of a request, which has no blocks, is in blocks that it would share."""
        end = self._num_shareable(request)
        return self._tree.match(self._sought(request), end)

    def fits(self, request: Request, *, spare_blocks: int = 0) -> bool:
        """Whether a request without blocks would find them, and `spare_blocks` would be left."""
        missing = self._num_blocks(request) + spare_blocks - self.num_free_blocks
        # What others use already takes nothing away; looked up only where it matters.
        return missing <= 0 or missing <= self.match(request).num_used_tokens // self.block_size

    def reserve(self, request: Request, found: Way | None = None) -> bool:
        """Make room for all tokens that a request has once the steps in flight have landed.

        Blocks with the same tokens are taken where there are. `Request.num_reserved_tokens` tells
        beforehand where there is nothing to do.

        Args:
            found: what `match` has just found of it, where it was asked.

        Returns:
            False, and nothing changed, where there are not enough free blocks.
        """
        table = self._tables.get(request.request_id)
        if table is None:
            return self._begin(request, found or self.match(request))
        missing = self._num_blocks(request) - len(table.block_ids)
        if missing > 0 and not self._grow(table, missing):
            return False
        request.num_reserved_tokens = len(table.block_ids) * self.block_size
        return True

    def hold(self, request: Request, found: Way) -> None:
        """Keep the shared blocks of a request, which has just begun, for a transfer.

        Of one that is fetched, those that were not found are nobody's to compute until they have
        arrived, or are given up.

        Args:
            found: what `reserve` was given.
        """
        table = self._tables[request.request_id]
        self._tree.join(table.last)
        hold = Hold(
            request,
            table.last,
            table.block_ids[: table.num_shared],
            block_size=self.block_size,
            start=found.num_tokens,
        )
        self._holds[request.request_id] = hold
        self._new_holds.append(hold)
        self._arriving.update(hold.blocks(hold.start))

    def take_new_holds(self) -> list[Hold]:
        """Those since the last time, for whoever moves blocks between engines."""
        taken, self._new_holds = self._new_holds, []
        return taken

    def note_arrived(self, request_id: str, num_tokens: int) -> int:
        """Of what a request has fetched, its first `num_tokens` tokens are in their blocks.

        Returns:
            how many more that is than before.
        """
        hold = self._holds[request_id]
        num_new = num_tokens - hold.num_arrived
        hold.num_arrived = num_tokens
        self._settle()
        return num_new

    def end_arrival(self, request_id: str) -> None:
        """Nothing more is fetched for a request: what has not arrived is to be computed."""
        hold = self._holds[request_id]
        hold.is_over = True
        self._arriving.difference_update(hold.blocks(hold.num_arrived))
        # What has arrived may wait for what comes before it, which the request sees to.
        if hold.is_settled or request_id not in self._tables:
            self.let_go(request_id)

    def can_quarantine(self, request_id: str) -> bool:
        """Whether there are enough free blocks for `quarantine`."""
        hold = self._holds[request_id]
        return len(hold.blocks(hold.num_arrived)) <= self.num_free_blocks

    def quarantine(self, request_id: str) -> bool:
        """Put other blocks in the place of those that a transfer may write to at any time.

        Returns:
            False, and nothing changed, where there are not enough free blocks.
        """
        hold = self._holds[request_id]
        left = hold.blocks(hold.num_arrived)
        fresh = _Table(self._tree.root, 0, block_array())
        if not self._grow(fresh, len(left)):
            return False
        replaced = dict(zip(left, fresh.block_ids, strict=True))
        node = hold.last
        while node.parent is not None:
            node.places = _renamed(node.places, replaced)
            node = node.parent
        owners: list[_Table | Hold] = [*self._tables.values(), *self._holds.values()]
        owners += (table for _, table in self._leaving)
        for owner in owners:
            if not replaced.keys().isdisjoint(owner.block_ids):
                owner.block_ids = _renamed(owner.block_ids, replaced)
        self._arriving = {replaced.get(block_id, block_id) for block_id in self._arriving}
        self._quarantined[request_id] = left
        return True

    def end_quarantine(self, request_id: str) -> None:
        """Free the blocks that a transfer might have written to, which it does no more."""
        self._pool.free(self._quarantined.pop(request_id))

    def let_go(self, request_id: str) -> None:
        """Keep its blocks no longer for a transfer."""
        hold = self._holds.pop(request_id)
        self._arriving.difference_update(hold.blocks(hold.start))
        self._let_go(_Table(hold.last, len(hold.block_ids), hold.block_ids))

    def num_hit_tokens(self, request: Request) -> int:
        """Of a request without blocks, the tokens that it need not compute."""
        if request.is_to_be_fetched:
            return self._num_shareable(request)
        return self.match(request).num_tokens

    def num_to_come(self, request: Request) -> int:
        """Tokens that are on their way from other engines, with those of a request that waits."""
        num_absent = self._num_shareable(request) - self.match(request).num_tokens
        return len(self._arriving) * self.block_size + num_absent

    def arriving_from(self, request: Request, found: Way | None = None) -> int:
        """Up to which of its tokens a request may be computed before more has arrived.

        Args:
            found: what `match` has just found of it, where it has no blocks.
        """
        end = request.num_tokens
        if found is None:
            nodes = self._tables[request.request_id].last.unfinished
        else:
            nodes = found.nodes
            if request.is_to_be_fetched and found.num_tokens < self._num_shareable(request):
                end = found.num_tokens
        return min([end, *self._arriving_tokens(nodes)]) if self._arriving else end

    def block_ids(self, request: Request) -> BlockIds:
        """The request's block table: token i lies in block `i // block_size` of it."""
        return self._tables[request.request_id].block_ids

    def block_tables(self, requests: Iterable[Request]) -> list[BlockIds]:
        """The same of each."""
        tables = self._tables
        return [tables[request.request_id].block_ids for request in requests]

    def next_block(self, request: Request) -> int:
        """The block that its next chunk begins in."""
        return self.block_ids(request)[request.num_scheduled_tokens // self.block_size]

    def num_computed_tokens(self, request: Request) -> int:
        """Tokens at its start that are computed in blocks that it shares, by whichever request."""
        return self._tables[request.request_id].last.num_computed_tokens

    def commit(self, request: Request) -> None:
        """Share what has come to be computed, which is up to `num_computed_tokens`."""
        if self._is_sharing:
            self._commit(request)
            self._settle()

    def release(self, request: Request) -> None:
        """Let go of all blocks of a request; one that has none is ignored."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self._let_go(table)
        hold = self._holds.get(request.request_id)
        if hold is not None and hold.is_over:
            self.let_go(request.request_id)

    def _commit(self, request: Request) -> None:
        table = self._tables[request.request_id]
        # Of drafts that were right, the request is only told after this.
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        num_full = num_tokens // self.block_size
        if num_full == table.num_full and not table.last.num_missing:
            return
        if table.num_full <= table.num_shared:
            self._tree.note_computed(table.last, num_tokens)
            if table.num_shared < num_full:
                self._share_own(request, table, num_full)
        table.num_full = num_full

    def borrow(self, *, fewest: int, most: int) -> list[int]:
        """Take blocks that hold nothing, for what is no request; none where there are too few."""
        count = min(most, self._pool.num_free)
        return (self._pool.allocate(count) or []) if count >= fewest else []

    def give_back(self, block_ids: Iterable[int]) -> None:
        """Undo `borrow`, once no step writes to them."""
        self._pool.free(block_ids)

    def begin_step(self) -> None:
        """A step is planned, which names blocks that requests have now."""
        self._num_begun += 1

    def end_step(self) -> None:
        """The oldest step in flight has landed, or is not going to be computed."""
        self._num_ended += 1
        while self._leaving and self._leaving[0][0] <= self._num_ended:
            self._free(self._leaving.popleft()[1])

    def take_moves(self) -> tuple[BlockMove, ...]:
        """Copies between blocks and host memory, to be made in this order before the next step."""
        return self._host.take_moves()

    def watch(self) -> None:
        """Have `take_events` report the shared blocks, those that are cached now first."""
        self._events.watch(self._tree.root)

    @property
    def has_untold_blocks(self) -> bool:
        """Whether `take_events` has yet to report blocks that were cached when the watch began."""
        return self._events.has_untold

    def take_events(self) -> list[KVEvent]:
        """Return the events of shared blocks since the last time; none unless they are watched.

        Blocks that were cached when the watch began come a bounded number at a time.
        """
        return self._events.take()

    def _settle(self) -> None:
        """Count as computed what has arrived, as far as all before it is."""
        if not self._arriving:
            return
        for hold in tuple(self._holds.values()):
            if hold.is_settled:
                continue
            if hold.num_computed_tokens >= hold.start:
                self._tree.note_computed(hold.last, hold.num_arrived)
            if hold.is_settled:
                self._arriving.difference_update(hold.blocks(hold.start, hold.num_arrived))
                if hold.is_over:
                    self.let_go(hold.request_id)

    def _arriving_tokens(self, nodes: Iterable[Node]) -> Iterator[int]:
        """The first tokens of blocks that are arriving."""
        for node in nodes:
            if node.num_missing:
                tokens = range(node.start, node.end, self.block_size)
                for token, place in zip(tokens, node.places, strict=True):
                    if place in self._arriving:
                        yield token

    def _let_go(self, table: _Table) -> None:
        if self._num_begun == self._num_ended:
            self._free(table)
        else:
            self._leaving.append((self._num_begun, table))

    def _free(self, table: _Table) -> None:
        own = table.block_ids[table.num_shared :]
        self._pool.free([*own, *self._tree.release(table.last)])

    def _begin(self, request: Request, found: Way) -> bool:
        nodes = self._tree.use(found)
        last = nodes[-1] if nodes else self._tree.root
        here = [node for node in nodes if not node.is_spilled]
        shared = block_array()
        for node in here:
            shared += node.places
        table = _Table(last, len(shared), shared)
        if not self._grow(table, self._num_blocks(request) - len(shared)):
            self._tree.release(last)
            return False
        for node in nodes[len(here) :]:
            self._host.restore(node, table.block_ids[self._blocks_of(node)])
        end = self._num_shareable(request) // self.block_size
        added = table.block_ids[last.end // self.block_size : end]
        if added:
            sought = self._sought(request)
            last = self._tree.extend(last, sought, added, num_missing=self.block_size)
        table.last, table.num_shared = last, last.end // self.block_size
        self._tables[request.request_id] = table
        request.num_reserved_tokens = len(table.block_ids) * self.block_size
        return True

    def _grow(self, table: _Table, count: int) -> bool:
        """Add blocks of its own to a table."""
        if count > self.num_free_blocks:
            return False
        num_fresh = min(count, self._pool.num_free)
        if num_fresh:
            last = table.block_ids[-1] if table.block_ids else None
            fresh = self._pool.allocate(num_fresh, after=last)
            assert fresh is not None
            table.block_ids = table.block_ids + block_array(fresh)
        if count > num_fresh:
            # What was one request's lies side by side, though it is evicted from its end on.
            evicted = sorted(self._tree.evict(count - num_fresh))
            table.block_ids = table.block_ids + block_array(evicted)
        return True

    def _share_own(self, request: Request, table: _Table, num_full: int) -> None:
        """Put its own blocks up to `num_full`, which are computed, into the tree.

        Where another request was faster, its blocks take the place of these. One that is still
        to be computed cannot, so that this block and those after it stay the request's own.
        """
        sought, end = self._sought(request), num_full * self.block_size
        twins = self._tree.match(sought, end, below=table.last)
        if twins.nodes:
            num_tokens = twins.num_computed_tokens // self.block_size * self.block_size
            self._take_over(table, twins.up_to(num_tokens))
            if num_tokens < twins.num_tokens:
                return
        added = table.block_ids[table.num_shared : num_full]
        if added:
            table.last = self._tree.extend(table.last, sought, added, num_missing=0)
            table.num_shared = num_full

    def _take_over(self, table: _Table, twins: Way) -> None:
        """Use computed blocks of the tree in the place of its own with the same tokens."""
        for node in self._tree.use(twins):
            taken = self._blocks_of(node)
            own = table.block_ids[taken]
            table.last, table.num_shared = node, taken.stop
            if node.is_spilled:
                self._host.replace(node, own)
                continue
            before, after = table.block_ids[: taken.start], table.block_ids[taken.stop :]
            table.block_ids = before + node.places + after
            self._let_go(_Table(self._tree.root, 0, own))

    def _blocks_of(self, node: Node) -> slice:
        """Which of the blocks of its users are in a node."""
        return slice(node.start // self.block_size, node.end // self.block_size)

    def _sought(self, request: Request) -> SoughtTokens:
        salt = request.message.service.cache_salt
        return SoughtTokens(request.token_ids, self.block_size, salt)

    def _num_shareable(self, request: Request) -> int:
        """Tokens in the blocks at its start that a request may take computed from others."""
        wants_scores = request.params.prompt_logprobs is not None
        if not self._is_sharing or (wants_scores and not request.num_output_tokens):
            return 0  # what is not computed cannot be scored
        return (request.num_tokens - 1) // self.block_size * self.block_size

    def _num_blocks(self, request: Request) -> int:
        return -(-request.num_expected_tokens // self.block_size)


def _renamed(block_ids: BlockIds, replaced: Mapping[int, int]) -> BlockIds:
    """A table with others in the place of some of its blocks; key and value are block ids."""
    return block_array(replaced.get(block_id, block_id) for block_id in block_ids)
