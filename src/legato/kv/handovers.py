"""Prompts that move between engines whole: blocks of all cache groups, and a state.

A window's blocks and a state are those at one token alone. So a cache that has windows or states
sends what a hit on a prompt needs, once the prompt is computed, and keeps what it receives as a
hit of later requests: first of the request that it was fetched for.
"""

from collections.abc import Iterator
from itertools import takewhile

from legato.core.request import Request
from legato.kv.block_ids import BlockIds, block_array
from legato.kv.block_tables import BlockTable, BlockTables
from legato.kv.checkpoints import StateCheckpoint
from legato.kv.lookup import PrefixLookup
from legato.kv.prefix_node import SoughtTokens, Way
from legato.kv.prefix_tree import PrefixTree
from legato.kv.state_slots import StateSlots
from legato.kv.window_groups import WindowGroups


class Handover:
    """What a hit on a prompt needs, kept for a transfer.

    Attributes:
        table: blocks of all its tokens. Its own blocks are to be filled.
        num_found: blocks at its start that were found in the tree.
        windows: of each window group, the blocks that the window reaches at the end.
        slot: slot of the state at the end; None without states.
        checkpoint: of that slot; None if there is none yet.
    """

    def __init__(
        self,
        sought: SoughtTokens,
        table: BlockTable,
        windows: tuple[BlockIds, ...],
        slot: int | None,
        checkpoint: StateCheckpoint | None = None,
    ) -> None:
        self.sought = sought
        self.table = table
        self.num_found = table.num_shared
        self.windows = windows
        self.slot = slot
        self.checkpoint = checkpoint

    @property
    def num_blocks(self) -> int:
        """Blocks of all its tokens."""
        return len(self.table.block_ids)


class Handovers:
    """Takes and gives back what transfers of whole prompts need.

    Windows and states lend only what running requests never need.

    Args:
        num_blocks: of the first cache group.
    """

    def __init__(
        self,
        tree: PrefixTree,
        tables: BlockTables,
        lookup: PrefixLookup,
        *,
        num_blocks: int,
        states: StateSlots | None,
        windows: WindowGroups | None,
    ) -> None:
        self._tree = tree
        self._tables = tables
        self._lookup = lookup
        self._num_blocks = num_blocks
        self._states = states
        self._windows = windows
        self._handovers: dict[Handover, None] = {}

    def __iter__(self) -> Iterator[Handover]:
        return iter(self._handovers)

    def end(self, request: Request) -> int:
        """Return the tokens of a request that a handover is of: the most that a hit may have."""
        unit = self._lookup.block_size if self._states is None else self._states.unit
        return self._lookup.num_shareable(request) // unit * unit

    def send(self, request: Request) -> Handover | None:
        """Keep what a hit on a computed prompt needs; None if it is not all in the cache."""
        sought, end = self._lookup.sought(request), self.end(request)
        way = self._lookup.cut(self._tree.match(sought, end))
        if not end or way.num_tokens != end or any(node.is_spilled for node in way.nodes):
            return None
        keys = self._block_ids(way)
        windows = () if self._windows is None else self._windows.hold(keys)
        if windows is None:
            return None
        checkpoint: StateCheckpoint | None = None
        if self._states is not None:
            checkpoint = self._states.hold(keys[-1])
            if checkpoint is None:
                self._end_windows(windows)
                return None
        table = BlockTable([*self._tree.use(way)][-1], len(keys), keys)
        slot = None if checkpoint is None else checkpoint.slot
        return self._begun(Handover(sought, table, windows, slot, checkpoint))

    def receive(self, request: Request) -> Handover | None:
        """Take places for what a hit on a prompt needs; None if there are too few, or no need."""
        sought, end = self._lookup.sought(request), self.end(request)
        way = self._tree.match(sought, end)
        if self._lookup.cut(way).num_tokens == end:
            return None
        here = [*takewhile(lambda node: not node.is_spilled, way.nodes)]
        way = way.up_to(min(way.num_tokens, here[-1].end if here else 0))
        nodes = self._tree.use(way)
        shared = self._block_ids(way._replace(nodes=nodes))
        last = nodes[-1] if nodes else self._tree.root
        table = BlockTable(last, len(shared), shared)
        num_blocks = end // sought.block_size
        if not self._tables.grow(table, num_blocks - len(shared)):
            self._tree.release(last)
            return None
        windows = () if self._windows is None else self._windows.receive(num_blocks)
        slot = None if self._states is None else self._states.receive()
        if windows is None or (slot is None and self._states is not None):
            if windows:
                self._end_windows(windows)
            if slot is not None and self._states is not None:
                self._states.end_hold(None, slot)
            self._tables.let_go(table)
            return None
        return self._begun(Handover(sought, table, windows, slot))

    def places(self, handover: Handover) -> list[int]:
        """Return what a handover keeps: blocks, blocks of each window group, and a state slot.

        Each number is that of a place in its group, plus the places of the groups before it.
        """
        first, places = self._num_blocks, handover.table.block_ids.tolist()
        groups = () if self._windows is None else self._windows.groups
        for group, block_ids in zip(groups, handover.windows, strict=False):
            places += [first + block_id for block_id in block_ids]
            first += group.num_blocks
        return places if handover.slot is None else [*places, first + handover.slot]

    def keep(self, handover: Handover) -> None:
        """Keep a received prompt for later requests; everything of it has arrived."""
        table = handover.table
        self._tables.share(table, handover.sought, handover.num_blocks)
        if self._windows is not None:
            self._windows.keep(table.block_ids, handover.windows)
        if self._states is not None and handover.slot is not None:
            end = handover.num_blocks * handover.sought.block_size
            handover.checkpoint = self._states.keep_received(
                table.block_ids[-1], handover.slot, end
            )

    def let_go(self, handover: Handover) -> None:
        """End a handover; what is not cached is free."""
        del self._handovers[handover]
        if self._states is not None:
            self._states.end_hold(handover.checkpoint, handover.slot)
        self._end_windows(handover.windows)
        self._tables.let_go(handover.table)

    def _begun(self, handover: Handover) -> Handover:
        self._handovers[handover] = None
        return handover

    def _end_windows(self, windows: tuple[BlockIds, ...]) -> None:
        if self._windows is not None:
            self._windows.end_hold(windows)

    def _block_ids(self, way: Way) -> BlockIds:
        """Return the blocks of a path that ends with whole nodes, or within its last node."""
        ids = block_array()
        for node in way.nodes:
            size = node.block_size
            ids += node.places[: (min(node.end, way.num_tokens) - node.start) // size]
        return ids
