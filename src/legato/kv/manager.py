"""Assigns blocks and state slots to requests, and shares what equal prompts have in common."""

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from legato.core.kv_events import KVEvent
from legato.core.kv_transfer import SendBlocks
from legato.core.plan import BlockMove, ChunkResult, ScheduledChunk
from legato.core.request import Request
from legato.core.token_ids import num_common_tokens
from legato.kv.block_ids import BlockIds, block_array
from legato.kv.block_pool import BlockPool
from legato.kv.block_tables import BlockTable, BlockTables
from legato.kv.cache_events import CacheEvents
from legato.kv.dependents import Dependents
from legato.kv.handovers import Handovers
from legato.kv.holds import Holds
from legato.kv.host_cache_slots import HostCacheSlots
from legato.kv.lookup import PrefixLookup
from legato.kv.path_ends import PathEnds
from legato.kv.prefix_node import Way
from legato.kv.prefix_tree import PrefixTree
from legato.kv.quarantine import Quarantine
from legato.kv.state_slots import CHUNK_MULTIPLE, CheckpointEnds, StateSlots
from legato.kv.window_groups import WindowGroups


class BorrowedBlocks(NamedTuple):
    """Blocks taken for a while; `windows` has those of each window group."""

    block_ids: list[int]
    windows: tuple[list[int], ...] = ()


class KVCacheManager:
    """Block tables over one pool, and a tree of the blocks that may be shared.

    A block is free, in the tree, or one request's own. All blocks of a prompt are in the tree from
    its admission on, before they are computed, so a second request with the same prompt has the
    same blocks and uses the tokens computed so far. The block of the last token is the request's
    own: that token is always computed, since the next token is sampled from it, and a computed
    block is never written to. Once that block is full, it joins the tree.

    With windows or states, blocks join the tree when they are computed, and a request shares only
    the blocks that it finds there: a window may have passed the blocks of a prompt before a second
    request with the same prompt needs them, and a state is that after one token alone.

    Args:
        enable_prefix_caching: False shares no block and keeps none.
        num_host_slots: evicted blocks that host memory can keep.
        states: slots for the states of recurrent layers; None if the model has no such layers.
        windows: blocks of layers that keep only the last tokens; None without such layers. The
            manager's own blocks are then those of the other layers.

    Attributes:
        states, windows: as given.
        shares_computed_only: whether blocks join the tree when they are computed.
        lookup: finds what a request would share.
        holds: of prompts whose blocks are transferred between engines.
        quarantine: of blocks that a transfer may still write to.
        handovers: prompts that are transferred whole, with windows or states.
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
        has_more = windows is not None or states is not None
        assert states is None or not states.unit % block_size or not enable_prefix_caching
        if states is not None and states.block_size is not None:
            assert enable_prefix_caching, "states between blocks would never be given up"
            assert states.block_size == block_size, "states would be kept inside blocks"
        self.shares_computed_only = enable_prefix_caching and has_more
        self.block_size = block_size
        self.states = states
        self.windows = windows
        self._is_sharing = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        dependents = Dependents(windows, states)
        self._events = CacheEvents(PathEnds(dependents.reaches) if has_more else None)
        if windows is not None:
            windows.report_to(self._events)
        if states is not None:
            states.checkpoints.report_to(self._events)
        self._host = HostCacheSlots(num_host_slots, self._events, dependents)
        self._tree = PrefixTree(self._host, self._events, dependents)
        self._tables = BlockTables(self._pool, self._tree, self._host)
        self.lookup = PrefixLookup(
            self._tree,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            states=states,
            windows=windows,
        )
        self.holds = Holds(self._tree, self._tables, self.lookup)
        self.quarantine = Quarantine(self._pool, self._tables, self.holds)
        self.handovers = Handovers(
            self._tree,
            self._tables,
            self.lookup,
            num_blocks=num_blocks,
            states=states,
            windows=windows,
        )

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Blocks of each cache group; the first has `num_blocks`."""
        windows = () if self.windows is None else self.windows.groups
        return self.num_blocks, *(group.num_blocks for group in windows)

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """Blocks of each cache group that host memory can keep."""
        windows = () if self.windows is None else self.windows.groups
        return self.num_host_slots, *(group.spilled.num_slots for group in windows)

    @property
    def num_states(self) -> int:
        """Slots of recurrent states; 0 without recurrent layers."""
        return 0 if self.states is None else self.states.num_slots

    @property
    def num_host_states(self) -> int:
        """Recurrent states that host memory can keep."""
        return 0 if self.states is None else self.states.num_host_slots

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
        return self._tables.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no request uses, kept for later requests."""
        return self._tree.num_unused

    @property
    def num_checkpoints(self) -> int:
        """States of recurrent layers that are kept for later requests."""
        return 0 if self.states is None else len(self.states.checkpoints)

    @property
    def usage(self) -> float:
        """Fraction of the blocks that requests use, in [0, 1]."""
        return 1.0 - self.num_free_blocks / self._pool.num_blocks

    @property
    def window_usage(self) -> dict[int, float]:
        """Fraction of the blocks that requests use, in [0, 1]; key a window in tokens."""
        return {} if self.windows is None else self.windows.usage

    def chunk_end(self, request: Request, end: int, found: Way | None = None) -> int:
        """Return where the next chunk of a prompt ends, at `end` or earlier at a checkpoint.

        Args:
            found: what `lookup.match` has just found for a request without blocks.
        """
        if self.states is None or not self._is_sharing:
            return end
        if found is None:
            ends = self.states.ends_of(request.request_id)
            return min(end, ends.after(request.num_scheduled_tokens))
        return min(end, self._ends(request, found).after(found.num_tokens))

    def fits(self, request: Request, *, spare_blocks: int = 0, num_leaving: int = 0) -> bool:
        """Whether a request without blocks would find them and leave `spare_blocks` free.

        There must be a state slot and a place in windows, too; `num_leaving` requests leave some.
        """
        has_slot = self.states is None or self.states.num_free + num_leaving
        if not (has_slot and (self.windows is None or self.windows.has_place or num_leaving)):
            return False
        missing = self._num_blocks(request) + spare_blocks - self.num_free_blocks
        # Blocks that other requests use cost nothing; they are looked up only if that matters.
        if missing <= 0:
            return True
        found = self.lookup.cached(request)
        return missing <= found.num_used_tokens // self.block_size and (
            missing <= self.lookup.cut(found).num_used_tokens // self.block_size
        )

    def reserve(self, request: Request, found: Way | None = None) -> bool:
        """Reserve blocks for all tokens that a request has after the steps in flight.

        Blocks with the same tokens are shared. `Request.num_reserved_tokens` tells beforehand
        whether there is anything to do. In window groups, only the next token gets a block.

        Args:
            found: what `lookup.match` has just found for the request, if it was called.

        Returns:
            whether there were enough free blocks, and state slots; if not, nothing has changed.
        """
        if request.request_id not in self._tables:
            return self._begin(request, found or self.lookup.match(request))
        return self.grow(request, request.num_expected_tokens, request.num_scheduled_tokens + 1)

    def grow(self, request: Request, num_tokens: int, in_windows: int | None = None) -> bool:
        """Reserve blocks for the first `num_tokens` tokens of a request that has blocks.

        Args:
            in_windows: for how many of them, in window groups; None for all.

        Returns:
            whether there were enough free blocks; if not, nothing has changed.
        """
        table, name, size = self._tables[request.request_id], request.request_id, self.block_size
        missing, end = -(-num_tokens // size) - len(table.block_ids), in_windows or num_tokens
        if self.windows is not None and (
            missing > self.num_free_blocks or not self.windows.grow(name, -(-end // size))
        ):
            return False
        if missing > 0 and not self._tables.grow(table, missing):
            return False
        self._note_room(request, table)
        return True

    def reserve_chunk(self, request: Request, num_tokens: int) -> bool:
        """Reserve the window groups' blocks for the next `num_tokens` tokens of a prompt.

        Returns:
            whether there were enough free blocks; if not, nothing has changed.
        """
        if self.windows is None:
            return True
        num_blocks = -(-(request.num_scheduled_tokens + num_tokens) // self.block_size)
        if not self.windows.grow(request.request_id, num_blocks):
            return False
        self._note_room(request, self._tables[request.request_id])
        return True

    def leads(self, chunk: ScheduledChunk, writer: Request, request: Request) -> bool:
        """Whether a prompt's chunk computes what another prompt finds in a later step.

        For a cache with windows or states (`shares_computed_only`). With states, the writer will
        keep a checkpoint where the other prompt leaves it.

        Args:
            writer: has the chunk.
        """
        if writer.message.service.block_salt != request.message.service.block_salt:
            return False
        most = min(self.lookup.num_shareable(request), self.lookup.num_shareable(writer))
        end = (chunk.start // self.block_size + 1) * self.block_size
        if self.states is None:
            return end <= most and writer.token_ids[:end] == request.token_ids[:end]
        num_common = num_common_tokens(writer.token_ids, request.token_ids, most)
        last = num_common // self.states.unit * self.states.unit
        if last < chunk.end:
            return False
        self.states.ends_of(writer.request_id).add(last)
        return True

    def find_again(self, request: Request) -> int:
        """Replace a prompt's blocks by what other requests have computed of it since.

        For a cache with windows or states. Nothing happens while a chunk of the prompt is in
        flight.

        Returns:
            the tokens at its start that need not be computed.
        """
        table = self._tables[request.request_id]
        if not request.is_in_flight:
            found = self.lookup.match(request)
            if found.num_tokens > request.num_scheduled_tokens:
                self._tables.take_over(table, found.below(table.last), is_computed=False)
                table.num_full = table.num_shared
                if self.windows is not None:
                    self.windows.release(request.request_id, self._tables.last_step)
                self._go_on(request, table, found)
        return self.num_computed_tokens(request)

    @property
    def transfers_whole(self) -> bool:
        """Whether prompts are transferred whole: see `handovers`, and otherwise `holds`."""
        return self.windows is not None or self.states is not None

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
        # Drafts after the end of an output are computed, but none of its tokens.
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        if self._is_sharing:
            self._commit(request, num_tokens)
            self._keep_state(request, num_tokens // self.block_size)
        if self.windows is not None:
            self.windows.advance(request.request_id, num_tokens, self._tables.last_step)

    def release(self, request: Request) -> None:
        """Let go of all that a request has here; a request without blocks is ignored."""
        if self.states is not None:
            self.states.release(request.request_id)
        if self._tables.release(request.request_id) and self.windows is not None:
            self.windows.release(request.request_id, self._tables.last_step)
        self.holds.release(request.request_id)

    def _commit(self, request: Request, num_tokens: int) -> None:
        table = self._tables[request.request_id]
        num_full = num_tokens // self.block_size
        if num_full == table.num_full and not table.last.num_missing:
            return
        if table.num_full <= table.num_shared:
            self.holds.settle(self._tree.note_computed(table.last, num_tokens))
            if table.num_shared < num_full:
                self._tables.share(table, self.lookup.sought(request), num_full)
        if self.windows is not None:
            self.windows.share(request.request_id, table.block_ids, table.num_full, num_full)
        table.num_full = num_full

    def _keep_state(self, request: Request, num_blocks: int) -> None:
        """Keep the state of a request at the end of its last computed block."""
        if self.states is not None and num_blocks:
            key = self.block_ids(request)[num_blocks - 1]
            self.states.keep(request.request_id, key, num_blocks * self.block_size)

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

    @property
    def most_drafts(self) -> int:
        """Drafts that a step may have; without recurrent layers, there is no limit."""
        return sys.maxsize if self.states is None else self.states.num_draft_slots

    def withdraw(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Record that the newest step in flight, with these chunks, will not be computed."""
        if self.states is not None:
            self.states.withdraw(chunks)
        self.end_step()

    def begin_step(self) -> None:
        """Record a planned step, which names the present blocks of requests."""
        self._tables.begin_step()

    def end_step(self, *, and_later: bool = False) -> None:
        """Record that the oldest step in flight, or each, has landed or will not be computed."""
        self._tables.end_step(and_later=and_later)
        if self.windows is not None:
            self.windows.end_steps(self._tables.num_ended)

    def end_all_steps(self) -> None:
        """Record that no step is in flight, and free what the steps held."""
        if self.states is not None:
            self.states.withdraw_all()
        self.end_step(and_later=True)

    def take_moves(self) -> tuple[BlockMove, ...]:
        """Return the copies to and from host memory to make, in order, before the step."""
        moves = self._host.take_moves() if self._host.num_slots else ()
        if self.windows is not None:
            moves += (*self.windows.take_moves(),)
        if self.states is not None:
            moves += (*self.states.take_moves(),)
        return moves

    def forget(self) -> None:
        """Forget all cached blocks that no request uses."""
        self._pool.free(self._tree.forget())

    def watch(self) -> None:
        """Make `take_events` report the shared blocks, first the ones cached now."""
        self._events.watch(self._tree.root)

    @property
    def has_untold_blocks(self) -> bool:
        """Whether `take_events` has yet to report blocks that were cached when the watch began."""
        return self._events.is_watched and self._events.has_untold

    def take_events(self) -> list[KVEvent]:
        """Return the events of shared blocks since the last call; none unless they are watched.

        Blocks that were cached when the watch began come a bounded number at a time.
        """
        return self._events.take() if self._events.is_watched else []

    def _begin(self, request: Request, found: Way) -> bool:
        has_slot = self.states is None or self.states.num_free
        if not (has_slot and (self.windows is None or self.windows.has_place)):
            return False
        nodes = self._tree.use(found)
        last = nodes[-1] if nodes else self._tree.root
        here = [node for node in nodes if not node.is_spilled]
        shared = block_array()
        for node in here:
            shared += node.places
        table = BlockTable(last, len(shared), shared)
        if not self._tables.grow(table, self._num_blocks(request) - len(shared)):
            self._tree.release(last)
            return False
        for node in nodes[len(here) :]:
            self._host.restore(node, table.block_ids[node.blocks])
        if not self.shares_computed_only:
            sought = self.lookup.sought(request)
            end = self.lookup.num_shareable(request) // self.block_size
            added = table.block_ids[last.end // self.block_size : end]
            if added:
                last = self._tree.extend(last, sought, added, num_missing=self.block_size)
        table.last, table.num_shared = last, last.end // self.block_size
        self._tables.add(request.request_id, table)
        if self.states is not None:
            self.states.begin(request.request_id, self._ends(request, found))
        self._go_on(request, table, found)
        return True

    def _go_on(self, request: Request, table: BlockTable, found: Way) -> None:
        """Take the windows' blocks and the states' checkpoint at the end of a hit."""
        num_blocks = found.num_tokens // self.block_size
        if self.windows is not None:
            num_shareable = self.lookup.num_shareable(request)
            ends = [end // self.block_size for end in (found.num_matched_tokens, num_shareable)]
            self.windows.begin(request.request_id, table.block_ids[:num_blocks], ends)
        if self.states is not None and num_blocks:
            key = table.block_ids[num_blocks - 1]
            self.states.restore(request.request_id, key, found.num_tokens)
        self._note_room(request, table)

    def _note_room(self, request: Request, table: BlockTable) -> None:
        """Note for how many tokens a request has blocks in all groups."""
        num_blocks = len(table.block_ids)
        if self.windows is not None:
            num_blocks = min(num_blocks, self.windows.num_blocks_of(request.request_id))
        request.num_reserved_tokens = num_blocks * self.block_size

    def _ends(self, request: Request, found: Way) -> CheckpointEnds:
        """Return where a prompt has checkpoints; few requests begin near a pooled prompt's end."""
        assert self.states is not None
        is_sent = isinstance(request.message.kv_transfer, SendBlocks)
        needed = self.handovers.end(request) if is_sent and not request.num_output_tokens else None
        return self.states.ends(found, 0 if request.is_pooled else request.num_tokens, needed)

    def _num_blocks(self, request: Request) -> int:
        return -(-request.num_expected_tokens // self.block_size)
