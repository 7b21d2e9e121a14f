"""All holds, and the blocks that are still to arrive for some of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from legato.core.request import Request
from legato.kv.block_tables import BlockTable, BlockTables, renamed
from legato.kv.hold import Hold
from legato.kv.lookup import PrefixLookup
from legato.kv.prefix_node import Node, Way
from legato.kv.prefix_tree import PrefixTree


class Holds:
    """Keeps blocks of prompts in the tree while transfers read them or write to them.

    No request computes an arriving block until it has arrived, or is given up. Arrived tokens count
    as computed once all tokens before them do: a hold whose base is not computed waits for it.
    """

    def __init__(self, tree: PrefixTree, tables: BlockTables, lookup: PrefixLookup) -> None:
        self._tree = tree
        self._tables = tables
        self._lookup = lookup
        self._holds: dict[str, Hold] = {}  # key request id
        self._new: list[Hold] = []
        self._arriving: set[int] = set()  # blocks
        # Holds with arrived tokens that do not count as computed; key their base.
        self._unsettled: dict[Node, dict[Hold, None]] = {}

    def __getitem__(self, request_id: str) -> Hold:
        return self._holds[request_id]

    def __iter__(self) -> Iterator[Hold]:
        return iter(self._holds.values())

    def num_to_come(self, request: Request) -> int:
        """Return the tokens to come from other engines, those of a waiting request included."""
        lookup = self._lookup
        num_absent = lookup.num_shareable(request) - lookup.match(request).num_tokens
        return len(self._arriving) * lookup.block_size + num_absent

    def begin(self, request: Request, found: Way) -> None:
        """Keep the shared blocks of a request, which has just begun, for a transfer.

        If the request fetches its blocks, no request computes the missing ones until they have
        arrived, or are given up.

        Args:
            found: the hit that the request began after.
        """
        table = self._tables[request.request_id]
        shared = table.block_ids[: table.num_shared]
        start = found.num_tokens
        size = self._lookup.block_size
        hold = Hold(request, table.last, shared, block_size=size, start=start)
        self._tree.join(hold.last)
        node = hold.last
        while node is not hold.base:
            assert node.parent is not None
            node.is_fetched, node = True, node.parent
        self._holds[hold.request_id] = hold
        self._new.append(hold)
        self._arriving.update(hold.blocks(hold.start))

    def take_new(self) -> list[Hold]:
        """Return the holds since the last call, for transfers between engines."""
        taken, self._new = self._new, []
        return taken

    def note_arrived(self, request_id: str, num_tokens: int) -> int:
        """Record that the first `num_tokens` tokens of a fetching request are in their blocks.

        Returns:
            how many of these tokens are new.
        """
        hold = self._holds[request_id]
        num_new = num_tokens - hold.num_arrived
        hold.num_arrived = num_tokens
        if hold.base.num_missing:
            self._unsettled.setdefault(hold.base, {})[hold] = None
        else:
            self.settle(self._count_arrived(hold))
        return num_new

    def end_arrival(self, request_id: str) -> None:
        """End a request's fetch; tokens that have not arrived are to be computed."""
        hold = self._holds[request_id]
        hold.is_over = True
        self._arriving.difference_update(hold.blocks(hold.num_arrived))
        # Arrived blocks may wait for earlier ones, which the request computes.
        if hold.is_settled or request_id not in self._tables:
            self.let_go(request_id)

    def release(self, request_id: str) -> None:
        """End the hold of a request that gives up its blocks, if nothing more will arrive."""
        hold = self._holds.get(request_id)
        if hold is not None and hold.is_over:
            self.let_go(request_id)

    def let_go(self, request_id: str) -> None:
        """End the hold on a request's blocks."""
        hold = self._holds.pop(request_id)
        unsettled = self._unsettled.get(hold.base, {})
        if unsettled.pop(hold, hold) is None and not unsettled:
            del self._unsettled[hold.base]
        self._arriving.difference_update(hold.blocks(hold.start))
        self._tables.let_go(BlockTable(hold.last, len(hold.block_ids), hold.block_ids))

    def settle(self, computed: Sequence[Node]) -> None:
        """Count arrived tokens as computed that waited for the tokens before them.

        Args:
            computed: nodes that are computed to their end since the last call.
        """
        nodes = [*computed] if self._unsettled else []
        while nodes:
            for hold in self._unsettled.pop(nodes.pop(), ()):
                nodes += self._count_arrived(hold)

    def _count_arrived(self, hold: Hold) -> list[Node]:
        """Count a hold's arrived tokens as computed; return the nodes computed to their end."""
        counted = hold.num_computed_tokens
        computed = self._tree.note_computed(hold.last, hold.num_arrived)
        self._arriving.difference_update(hold.blocks(counted, hold.num_arrived))
        if hold.is_over:
            self.let_go(hold.request_id)
        return computed

    def arriving_from(self, request: Request, found: Way | None = None) -> int:
        """Return up to which token a request may be computed before more blocks arrive.

        Args:
            found: what `PrefixLookup.match` has just found for a request without blocks.
        """
        end = request.num_tokens
        if found is None:
            nodes = self._tables[request.request_id].last.unfinished[::-1]
        else:
            nodes = found.nodes
            if request.is_to_be_fetched and found.num_tokens < self._lookup.num_shareable(request):
                end = found.num_tokens
        return min(end, next(self._arriving_tokens(nodes), end)) if self._arriving else end

    def rename(self, replaced: Mapping[int, int]) -> None:
        """Replace blocks by others; key and value are block ids."""
        for hold in self:
            hold.block_ids = renamed(hold.block_ids, replaced)
        self._arriving = {replaced.get(block_id, block_id) for block_id in self._arriving}

    def _arriving_tokens(self, nodes: Iterable[Node]) -> Iterator[int]:
        """Yield the first token of each arriving block in these nodes, which follow each other."""
        for node in nodes:
            if node.num_missing and node.is_fetched:
                size, first = node.block_size, node.num_computed_blocks
                for index, place in enumerate(node.places[first:], first):
                    if place in self._arriving:
                        yield node.start + index * size
