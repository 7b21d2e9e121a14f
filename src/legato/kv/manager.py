"""Assigns blocks to requests for their keys and values, and shares equal blocks."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from legato.core.block_ids import BlockIds, block_array
from legato.core.kv_events import KVEvent
from legato.core.plan import BlockMove, ChunkResult, ScheduledChunk
from legato.core.request import Request
from legato.kv.block_pool import BlockPool
from legato.kv.cache_events import CacheEvents
from legato.kv.hold import Hold
from legato.kv.holds import Holds, renamed
from legato.kv.host_cache_slots import HostCacheSlots
from legato.kv.prefix_node import Node, SoughtTokens, Way
from legato.kv.prefix_tree import PrefixTree
from legato.kv.state_slots import CHUNK_MULTIPLE, StateSlots
from legato.kv.window_groups import WindowGroups


class BorrowedBlocks(NamedTuple):
    """Blocks taken for a while; `windows` has those of each window group."""

    block_ids: list[int]
    windows: tuple[list[int], ...] = ()


class _Table:
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


class KVCacheManager:
    """Block tables over one pool, and a tree of the blocks that may be shared.

    A block is free, in the tree, or one request's own. All blocks of a prompt are in the tree from
    its admission on, before they are computed, so a second request with the same prompt has the
    same blocks and uses the tokens computed so far. The block of the last token is the request's
    own: that token is always computed, since the next token is sampled from it, and a computed
    block is never written to. Once that block is full, it joins the tree.

    Blocks let go while steps are in flight become free when the last step that may name them has
    landed (`begin_step`, `end_step`).

    Args:
        enable_prefix_caching: False shares no block and keeps none.
        num_host_slots: evicted blocks that host memory can keep.
        states: slots for the states of recurrent layers; None if the model has no such layers.
        windows: blocks of layers that keep only the last tokens; None without such layers. The
            manager's own blocks are then those of the other layers, and `num_host_slots` is 0. A
            request shares only blocks that are computed, since a window may have passed the blocks
            of a prompt before a second request with the same prompt needs them.

    Attributes:
        states: as given.
        holds: of prompts whose blocks are transferred between engines.
        windows: as given.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_host_slots: int = 0,
        states: StateSlots | None = None,
        windows: WindowGroups | None = None,
    ) -> None:
        assert states is None or not enable_prefix_caching, "blocks cannot be shared without states"
        assert windows is None or not num_host_slots
        self.block_size = block_size
        self.states = states
        self.windows = windows
        self._is_sharing = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._events = CacheEvents()
        self._host = HostCacheSlots(num_host_slots, self._events)
        self._tree = PrefixTree(self._host, self._events)
        self._tables: dict[str, _Table] = {}  # key request id
        self._num_begun = self._num_ended = 0  # steps
        self._leaving: deque[tuple[int, _Table]] = deque()  # (last step that names them, blocks)
        self.holds = Holds(self._tree, self._free_hold)
        # Key request id, value blocks that its transfer may still write to; no request has them.
        self._quarantined: dict[str, BlockIds] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Blocks of each cache group; the first has `num_blocks`."""
        windows = () if self.windows is None else self.windows.groups
        return self.num_blocks, *(group.num_blocks for group in windows)

    @property
    def num_host_slots(self) -> int:
        return self._host.num_slots

    @property
    def chunk_multiple(self) -> int:
        """Positions at whose multiples a chunk of a prompt should end."""
        return 1 if self.states is None else CHUNK_MULTIPLE

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request uses; the cached ones among them are evicted when needed."""
        return self._pool.num_free + self._tree.num_unused

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no request uses, kept for later requests."""
        return self._tree.num_unused

    @property
    def usage(self) -> float:
        """Fraction of the blocks that requests use, in [0, 1]."""
        return 1.0 - self.num_free_blocks / self._pool.num_blocks

    @property
    def window_usage(self) -> dict[int, float]:
        """Fraction of the blocks that requests use, in [0, 1]; key a window in tokens."""
        return {} if self.windows is None else self.windows.usage

    def match(self, request: Request) -> Way:
        """Look up the tokens that a request would share, before it has blocks."""
        end = self.num_shareable(request)
        way = self._tree.match(self._sought(request), end)
        return way if self.windows is None else self.windows.cut(way)

    def fits(self, request: Request, *, spare_blocks: int = 0) -> bool:
        """Whether a request without blocks would find them and leave `spare_blocks` free.

        If the model has recurrent layers, there must be state slots for it, too.
        """
        if self.states is not None and not self.states.num_free:
            return False
        if self.windows is not None and not self.windows.has_place:
            return False
        missing = self._num_blocks(request) + spare_blocks - self.num_free_blocks
        # Blocks that other requests use cost nothing; they are looked up only if that matters.
        return missing <= 0 or missing <= self.match(request).num_used_tokens // self.block_size

    def reserve(self, request: Request, found: Way | None = None) -> bool:
        """Reserve blocks for all tokens that a request has after the steps in flight.

        Blocks with the same tokens are shared. `Request.num_reserved_tokens` tells beforehand
        whether there is anything to do.

        Args:
            found: what `match` has just found for the request, if it was called.

        Returns:
            whether there were enough free blocks, and state slots; if not, nothing has changed.
        """
        table = self._tables.get(request.request_id)
        if table is None:
            if self.states is not None and not self.states.num_free:
                return False
            if not self._begin(request, found or self.match(request)):
                return False
            if self.states is not None:
                self.states.begin(request.request_id)
            return True
        num_blocks = self._num_blocks(request)
        missing = num_blocks - len(table.block_ids)
        if self.windows is not None and (
            missing > self.num_free_blocks or not self.windows.grow(request.request_id, num_blocks)
        ):
            return False
        if missing > 0 and not self._grow(table, missing):
            return False
        request.num_reserved_tokens = len(table.block_ids) * self.block_size
        return True

    def reserve_chunk(self, request: Request, num_tokens: int) -> bool:
        """Reserve the window groups' blocks for the next `num_tokens` tokens of a prompt.

        Returns:
            whether there were enough free blocks; if not, nothing has changed.
        """
        if self.windows is None:
            return True
        end = request.num_scheduled_tokens + num_tokens
        return self.windows.grow(request.request_id, -(-end // self.block_size))

    def find_again(self, request: Request) -> int:
        """Replace a prompt's blocks by what other requests have computed of it since.

        For a cache with window groups: a request with other blocks shares all of them at once. No
        chunk of it may be in flight.

        Returns:
            the tokens at its start that need not be computed.
        """
        if self._last_step is None:
            found = self.match(request)
            if found.num_tokens > request.num_scheduled_tokens:
                self.release(request)
                has_blocks = self._begin(request, found)
                assert has_blocks, "it needs no more blocks than it had"
        return self.num_computed_tokens(request)

    def hold(self, request: Request, found: Way) -> None:
        """Keep the shared blocks of a request, which has just begun, for a transfer.

        If the request fetches its blocks, no request computes the missing ones until they have
        arrived, or are given up.

        Args:
            found: the argument of `reserve`.
        """
        table = self._tables[request.request_id]
        shared = table.block_ids[: table.num_shared]
        start = found.num_tokens
        self.holds.add(Hold(request, table.last, shared, block_size=self.block_size, start=start))

    def note_arrived(self, request_id: str, num_tokens: int) -> int:
        """See `Holds.note_arrived`."""
        return self.holds.note_arrived(request_id, num_tokens)

    def end_arrival(self, request_id: str) -> None:
        """See `Holds.end_arrival`."""
        self.holds.end_arrival(request_id, has_blocks=request_id in self._tables)

    def can_quarantine(self, request_id: str) -> bool:
        """Whether there are enough free blocks for `quarantine`."""
        hold = self.holds[request_id]
        return len(hold.blocks(hold.num_arrived)) <= self.num_free_blocks

    def quarantine(self, request_id: str) -> bool:
        """Replace the blocks that a transfer may write to at any time.

        Returns:
            whether there were enough free blocks; if not, nothing has changed.
        """
        hold = self.holds[request_id]
        left = hold.blocks(hold.num_arrived)
        fresh = _Table(self._tree.root, 0, block_array())
        if not self._grow(fresh, len(left)):
            return False
        replaced = dict(zip(left, fresh.block_ids, strict=True))
        node = hold.last
        while node.parent is not None:
            node.places = renamed(node.places, replaced)
            node = node.parent
        for table in (*self._tables.values(), *(table for _, table in self._leaving)):
            table.block_ids = renamed(table.block_ids, replaced)
        self.holds.rename(replaced)
        self._quarantined[request_id] = left
        return True

    def end_quarantine(self, request_id: str) -> None:
        """Free the quarantined blocks of a transfer that writes to them no more."""
        self._pool.free(self._quarantined.pop(request_id))

    def num_hit_tokens(self, request: Request) -> int:
        """Return the tokens that a request without blocks need not compute."""
        if request.is_to_be_fetched:
            return self.num_shareable(request)
        return self.match(request).num_tokens

    def num_to_come(self, request: Request) -> int:
        """Return the tokens to come from other engines, those of a waiting request included."""
        num_absent = self.num_shareable(request) - self.match(request).num_tokens
        return self.holds.num_arriving_blocks * self.block_size + num_absent

    def arriving_from(self, request: Request, found: Way | None = None) -> int:
        """Return up to which token a request may be computed before more blocks arrive.

        Args:
            found: what `match` has just found for a request without blocks.
        """
        end = request.num_tokens
        if found is None:
            nodes = self._tables[request.request_id].last.unfinished
        else:
            nodes = found.nodes
            if request.is_to_be_fetched and found.num_tokens < self.num_shareable(request):
                end = found.num_tokens
        if not self.holds.num_arriving_blocks:
            return end
        return min([end, *self.holds.arriving_tokens(nodes, self.block_size)])

    def block_ids(self, request: Request) -> BlockIds:
        """Return the request's block table: token i is in its block `i // block_size`."""
        return self._tables[request.request_id].block_ids

    def block_tables(self, requests: Iterable[Request]) -> list[BlockIds]:
        """Return the block table of each request."""
        tables = self._tables
        return [tables[request.request_id].block_ids for request in requests]

    def window_tables(self, requests: Sequence[Request]) -> list[tuple[BlockIds, ...]]:
        """Return each request's block tables in the window groups; no table without such groups."""
        if self.windows is None:
            return [()] * len(requests)
        return [self.windows.tables(request.request_id) for request in requests]

    def next_block(self, request: Request) -> int:
        """Return the block that the request's next chunk begins in."""
        return self.block_ids(request)[request.num_scheduled_tokens // self.block_size]

    def num_computed_tokens(self, request: Request) -> int:
        """Return the tokens at its start that any request has computed in its shared blocks."""
        return self._tables[request.request_id].last.num_computed_tokens

    def commit(self, request: Request) -> None:
        """Share the request's blocks that are computed, up to `num_computed_tokens`."""
        if self._is_sharing:
            self._commit(request)
            self.holds.settle()
        if self.windows is not None:
            num_tokens = min(request.num_computed_tokens, request.num_tokens)
            self.windows.advance(request.request_id, num_tokens, self._last_step)

    def release(self, request: Request) -> None:
        """Let go of all that a request has here; a request without blocks is ignored."""
        if self.states is not None:
            self.states.release(request.request_id)
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self._let_go(table)
            if self.windows is not None:
                self.windows.release(request.request_id, self._last_step)
        self.holds.release(request.request_id)

    def _commit(self, request: Request) -> None:
        table = self._tables[request.request_id]
        # The request learns the tokens of right drafts only after this.
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        num_full = num_tokens // self.block_size
        if num_full == table.num_full and not table.last.num_missing:
            return
        if table.num_full <= table.num_shared:
            self._tree.note_computed(table.last, num_tokens)
            if table.num_shared < num_full:
                self._share_own(request, table, num_full)
        if self.windows is not None:
            self.windows.share(request.request_id, table.block_ids, table.num_full, num_full)
        table.num_full = num_full

    def borrow(self, *, fewest: int, most: int) -> BorrowedBlocks | None:
        """Take empty blocks that no request uses; None if there are too few.

        Args:
            fewest, most: how many, of the layers that keep all tokens.
        """
        count = min(most, self._pool.num_free)
        if count < fewest or not (self.windows is None or self.windows.can_lend):
            return None
        windows = () if self.windows is None else self.windows.borrow()
        block_ids = self._pool.allocate(count)
        assert block_ids is not None
        return BorrowedBlocks(block_ids, windows)

    def give_back(self, borrowed: BorrowedBlocks) -> None:
        """Undo `borrow`, once no step writes to the blocks."""
        self._pool.free(borrowed.block_ids)
        if self.windows is not None:
            self.windows.give_back(borrowed.windows)

    def assigned(self, chunks: Sequence[ScheduledChunk]) -> tuple[ScheduledChunk, ...]:
        """Return the chunks of a step, with state slots if the model has recurrent layers."""
        return tuple(chunks) if self.states is None else self.states.assigned(chunks)

    def landed(self, chunk: ScheduledChunk, result: ChunkResult | None) -> ChunkResult | None:
        """Return how much of a chunk counts, None for a fault; see `StateSlots.land`."""
        return result if self.states is None else self.states.land(chunk, result)

    def withdraw(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Record that the newest step in flight, with these chunks, will not be computed."""
        if self.states is not None:
            self.states.withdraw(chunks)
        self.end_step()

    def begin_step(self) -> None:
        """Record a planned step, which names the present blocks of requests."""
        self._num_begun += 1

    def end_step(self) -> None:
        """Record that the oldest step in flight has landed, or will not be computed."""
        self._num_ended += 1
        while self._leaving and self._leaving[0][0] <= self._num_ended:
            self._free(self._leaving.popleft()[1])
        if self.windows is not None:
            self.windows.end_steps(self._num_ended)

    def take_moves(self) -> tuple[BlockMove, ...]:
        """Return the copies between blocks and host memory to make, in order, before the step."""
        return self._host.take_moves()

    def forget(self) -> None:
        """Forget all cached blocks that no request uses."""
        self._pool.free(self._tree.forget())

    def watch(self) -> None:
        """Make `take_events` report the shared blocks, first those that are cached now."""
        self._events.watch(self._tree.root)

    @property
    def has_untold_blocks(self) -> bool:
        """Whether `take_events` has yet to report blocks that were cached when the watch began."""
        return self._events.has_untold

    def take_events(self) -> list[KVEvent]:
        """Return the events of shared blocks since the last call; none unless they are watched.

        Blocks that were cached when the watch began come a bounded number at a time.
        """
        return self._events.take()

    @property
    def _last_step(self) -> int | None:
        """Number of the last step in flight; None if there is none."""
        return None if self._num_begun == self._num_ended else self._num_begun

    def _let_go(self, table: _Table) -> None:
        last_step = self._last_step
        if last_step is None:
            self._free(table)
        else:
            self._leaving.append((last_step, table))

    def _free_hold(self, hold: Hold) -> None:
        self._let_go(_Table(hold.last, len(hold.block_ids), hold.block_ids))

    def _free(self, table: _Table) -> None:
        own = table.block_ids[table.num_shared :]
        self._pool.free([*own, *self._tree.release(table.last)])

    def _begin(self, request: Request, found: Way) -> bool:
        if self.windows is not None and not self.windows.has_place:
            return False
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
        end = self.num_shareable(request) // self.block_size
        if self.windows is not None:
            met = self._tree.match(self._sought(request), end * self.block_size)
            ends = met.num_tokens // self.block_size, end
            self.windows.begin(request.request_id, shared, ends)
        added = table.block_ids[last.end // self.block_size : end]
        if added and self.windows is None:
            sought = self._sought(request)
            last = self._tree.extend(last, sought, added, num_missing=self.block_size)
        table.last, table.num_shared = last, last.end // self.block_size
        self._tables[request.request_id] = table
        request.num_reserved_tokens = len(table.block_ids) * self.block_size
        return True

    def _grow(self, table: _Table, count: int) -> bool:
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
            if self.windows is not None:
                self.windows.forget(evicted)
            table.block_ids = table.block_ids + block_array(evicted)
        return True

    def _share_own(self, request: Request, table: _Table, num_full: int) -> None:
        """Put a request's own blocks up to `num_full`, which are computed, into the tree.

        If another request was faster, its blocks replace these. A block of it that is still to be
        computed cannot, so this request keeps its own block and those after it.
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
        """Replace a table's own blocks by computed blocks of the tree with the same tokens."""
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
        """Return the part of its users' block tables that is in a node."""
        return slice(node.start // self.block_size, node.end // self.block_size)

    def _sought(self, request: Request) -> SoughtTokens:
        salt = request.message.service.cache_salt
        return SoughtTokens(request.token_ids, self.block_size, salt)

    def num_shareable(self, request: Request) -> int:
        """Return the tokens in the blocks at its start that a request may share."""
        reads_all_rows = (
            request.params.prompt_logprobs is not None or request.message.pooling == "mean"
        )
        if not self._is_sharing or (reads_all_rows and not request.num_output_tokens):
            return 0  # tokens that it does not compute cannot be scored, or pooled
        return (request.num_tokens - 1) // self.block_size * self.block_size

    def _num_blocks(self, request: Request) -> int:
        return -(-request.num_expected_tokens // self.block_size)
