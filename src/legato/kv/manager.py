"""Which blocks hold each request's keys and values, and which of them requests share."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from legato.core.plan import BlockMove
from legato.core.request import Request
from legato.kv.block_pool import BlockPool
from legato.kv.host_pool import HostPool
from legato.kv.prefix_node import Key, Node
from legato.kv.prefix_tree import PrefixTree


class PrefixMatch(NamedTuple):
    """What of a request is in the cache.

    Attributes:
        num_tokens: in blocks that it would share, computed or to be computed by another request.
        num_computed_tokens: of these, those at the start that are computed.
        next_block: that the first of the others goes to; None where there are none.
    """

    num_tokens: int
    num_computed_tokens: int
    next_block: int | None


class _Table:
    """Blocks of one request: [0, len(shared)) are nodes of the tree, the rest are its own.

    Attributes:
        block_ids: all of them, in token order.
        num_full: blocks from the start on that are known to be computed.
    """

    __slots__ = ("block_ids", "num_full", "shared")

    def __init__(self, shared: list[Node], block_ids: tuple[int, ...]) -> None:
        self.shared = shared
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
        self._host = HostPool(num_host_slots)
        self._tree = PrefixTree(self._host)
        self._tables: dict[str, _Table] = {}  # key request id
        self._num_begun = self._num_ended = 0  # steps
        self._leaving: deque[tuple[int, _Table]] = deque()  # (number of the last step, what it has)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

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

    def match(self, request: Request) -> PrefixMatch:
        """Look up a request that has no blocks."""
        path = self._match(request)
        num_full = _num_full(path, 0)
        return PrefixMatch(
            num_tokens=len(path) * self.block_size,
            num_computed_tokens=self._num_computed(path, num_full),
            next_block=path[num_full].block_id if num_full < len(path) else None,
        )

    def fits(self, request: Request, *, spare_blocks: int = 0) -> bool:
        """Whether a request without blocks would find them, and `spare_blocks` would be left."""
        missing = self._num_blocks(request) + spare_blocks - self.num_free_blocks
        # What others use already takes nothing away; looked up only where it matters.
        return missing <= 0 or missing <= sum(n.num_users > 0 for n in self._match(request))

    def reserve(self, request: Request) -> bool:
        """Make room for all tokens that a request has once the steps in flight have landed.

        Blocks with the same tokens are taken where there are. `Request.num_reserved_tokens` tells
        beforehand where there is nothing to do.

        Returns:
            False, and nothing changed, where there are not enough free blocks.
        """
        table = self._tables.get(request.request_id)
        if table is None:
            return self._begin(request)
        missing = self._num_blocks(request) - len(table.block_ids)
        if missing > 0 and not self._grow(table, missing):
            return False
        request.num_reserved_tokens = len(table.block_ids) * self.block_size
        return True

    def block_ids(self, request: Request) -> tuple[int, ...]:
        """The request's block table: token i lies in block `i // block_size` of it."""
        return self._tables[request.request_id].block_ids

    def next_block(self, request: Request) -> int:
        """The block that its next chunk begins in."""
        return self.block_ids(request)[request.num_scheduled_tokens // self.block_size]

    def num_computed_tokens(self, request: Request) -> int:
        """Tokens at its start that are computed in blocks that it shares, by whichever request."""
        table = self._tables[request.request_id]
        table.num_full = _num_full(table.shared, table.num_full)
        return self._num_computed(table.shared, table.num_full)

    def commit(self, request: Request) -> None:
        """Share what has come to be computed, which is up to `num_computed_tokens`."""
        if not self._is_sharing:
            return
        table = self._tables[request.request_id]
        num_full, num_more = divmod(request.num_computed_tokens, self.block_size)
        while table.num_full < num_full:
            if table.num_full < len(table.shared):
                table.shared[table.num_full].num_missing = 0
            elif table.num_full == len(table.shared):
                self._share_own(request, table)
            table.num_full += 1
        if num_more and num_full < len(table.shared):
            table.shared[num_full].num_missing = self.block_size - num_more

    def release(self, request: Request) -> None:
        """Let go of all blocks of a request; one that has none is ignored."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self._let_go(table)

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

    def _let_go(self, table: _Table) -> None:
        if self._num_begun == self._num_ended:
            self._free(table)
        else:
            self._leaving.append((self._num_begun, table))

    def _free(self, table: _Table) -> None:
        own = table.block_ids[len(table.shared) :]
        self._pool.free([*own, *self._tree.release(table.shared)])

    def _begin(self, request: Request) -> bool:
        path = self._match(request)
        num_here = sum(not node.is_spilled for node in path)
        self._tree.use(path)
        here = path[:num_here]
        table = _Table(here, tuple(node.block_id for node in here))
        if not self._grow(table, self._num_blocks(request) - num_here):
            self._tree.release(path)
            return False
        self._tree.restore(path[num_here:], table.block_ids[num_here : len(path)])
        table.shared = path
        first, end = len(path), self._num_shareable(request)
        self._tree.extend(
            path,
            self._key_run(request, first, end),
            table.block_ids[first:end],
            num_missing=self.block_size,
        )
        self._tables[request.request_id] = table
        request.num_reserved_tokens = len(table.block_ids) * self.block_size
        return True

    def _grow(self, table: _Table, count: int) -> bool:
        """Add blocks of its own to a table."""
        if count > self.num_free_blocks:
            return False
        last = table.block_ids[-1] if table.block_ids else None
        fresh = self._pool.allocate(min(count, self._pool.num_free), after=last)
        assert fresh is not None
        # What was one request's lies side by side, though it is evicted from its end on.
        evicted = sorted(self._tree.evict(count - len(fresh)))
        table.block_ids = (*table.block_ids, *fresh, *evicted)
        return True

    def _share_own(self, request: Request, table: _Table) -> None:
        """Put the first block of its own, which is full, into the tree.

        Where another request was faster, its block takes the place of this one. One that is still
        to be computed cannot, so that this block and those after it stay the request's own.
        """
        index = len(table.shared)
        (key,) = self._keys(request, index, index + 1)
        block_id = table.block_ids[index]
        twin = self._tree.child(table.shared, key)
        if twin is None:
            self._tree.extend(table.shared, [key], [block_id], num_missing=0)
        elif twin.is_computed:
            self._tree.use([twin])
            table.shared.append(twin)
            if twin.is_spilled:
                self._host.replace(twin, block_id)
                return
            table.block_ids = (
                *table.block_ids[:index],
                twin.block_id,
                *table.block_ids[index + 1 :],
            )
            self._let_go(_Table([], (block_id,)))

    def _num_computed(self, path: list[Node], num_full: int) -> int:
        """Tokens at the start of a way that are computed, of which `num_full` blocks are."""
        num_tokens = num_full * self.block_size
        if num_full < len(path):
            num_tokens += self.block_size - path[num_full].num_missing
        return num_tokens

    def _match(self, request: Request) -> list[Node]:
        return self._tree.match(self._keys(request, 0, self._num_shareable(request)))

    def _keys(self, request: Request, first: int, end: int) -> Iterator[Key]:
        """Of the request's blocks [first, end), made as they are asked for, twice as many again."""
        keys = request.block_keys
        for index in range(first, end):
            if index == len(keys):
                keys += self._new_keys(request, index, min(end, 2 * index + 8))
            yield keys[index]

    def _key_run(self, request: Request, first: int, end: int) -> list[Key]:
        """Of the request's blocks [first, end), at once."""
        keys = request.block_keys
        if len(keys) < end:
            keys += self._new_keys(request, len(keys), end)
        return keys[first:end]

    def _new_keys(self, request: Request, first: int, end: int) -> list[Key]:
        size = self.block_size
        tokens = request.token_ids[first * size : end * size].tobytes()
        step = len(tokens) // (end - first)
        keys = [tokens[start : start + step] for start in range(0, len(tokens), step)]
        salt = request.message.service.cache_salt
        if not first and salt is not None:
            # Longer than a block's tokens, so that it is never taken for one without a salt.
            keys[0] = f"{salt}\0".encode() + keys[0]
        return keys

    def _num_shareable(self, request: Request) -> int:
        """Blocks at the start of a request that it may take computed from others."""
        wants_scores = request.params.prompt_logprobs is not None
        if not self._is_sharing or (wants_scores and not request.num_output_tokens):
            return 0  # what is not computed cannot be scored
        return (request.num_tokens - 1) // self.block_size

    def _num_blocks(self, request: Request) -> int:
        return -(-request.num_expected_tokens // self.block_size)


def _num_full(path: list[Node], known: int) -> int:
    """Nodes at the start of a way that are computed, of which `known` are known to be."""
    while known < len(path) and not path[known].num_missing:
        known += 1
    return known
